"""NeMo-Aligner's actors import its TensorRT-LLM generator at the top; here only its use fails."""

import sys
from types import ModuleType
from typing import Any

_MODULE = "nemo_aligner.utils.trt_llm"


class GPTGenerateTRTLLM:
    """Refuses to be built: TensorRT-LLM needs a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("TensorRT-LLM generation needs a GPU; use rollout.backend=megatron on the CPU")


def seat() -> None:
    """Put this stand-in where NeMo-Aligner's actors look for the generator."""
    module = ModuleType(_MODULE, __doc__)
    module.GPTGenerateTRTLLM = GPTGenerateTRTLLM
    sys.modules[_MODULE] = module
