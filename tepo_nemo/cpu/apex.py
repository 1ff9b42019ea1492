"""Equivalents of the few names that NeMo takes from NVIDIA's Apex and its kernel module `amp_C`."""

from types import SimpleNamespace
from typing import Any

from megatron.core.utils import (
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
)

multi_tensor_applier = local_multi_tensor_applier
amp_C = SimpleNamespace(
    multi_tensor_l2norm=local_multi_tensor_l2_norm, multi_tensor_scale=local_multi_tensor_scale
)


def listify_model(model: Any) -> list:
    """The model's chunks: Megatron passes a list where the pipeline is interleaved, else one module."""
    return model if isinstance(model, list) else [model]


class DistributedFusedAdam:
    """Apex's own sharded Adam. NeMo only asks whether an optimizer is one; none is on the CPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("distributed_fused_adam needs Apex and a GPU; use mcore_distributed_optim")
