"""The Transformer Engine layers that NeMo names when it is imported; none can be built on the CPU."""

import sys
from types import ModuleType
from typing import Any

# Megatron-core's module of Transformer Engine layers; NeMo's specifications import it unguarded.
_MODULE = "megatron.core.extensions.transformer_engine"
_LAYERS = (
    "TEColumnParallelLinear",
    "TEDotProductAttention",
    "TELayerNormColumnParallelLinear",
    "TENorm",
    "TERowParallelLinear",
)
_FUNCTIONS = ("SplitAlongDim", "te_checkpoint")


def _unavailable(self: Any, *_: Any, **__: Any) -> None:
    raise RuntimeError(
        f"{type(self).__name__} needs Transformer Engine and a GPU; use the local layer specification"
    )


def seat() -> None:
    """Let NeMo import from `megatron.core.extensions.transformer_engine`, at its import and with a model."""
    module = ModuleType(_MODULE, __doc__)
    for name in _LAYERS:
        setattr(module, name, type(name, (), {"__init__": _unavailable, "__module__": _MODULE}))
    for name in _FUNCTIONS:
        setattr(
            module, name, None
        )  # as Megatron-core itself does where Transformer Engine is too old to have them
    sys.modules[_MODULE] = module
