"""What Megatron-core leaves open where it finds neither CUDA, Apex nor Transformer Engine."""

import copy
from typing import Any

import megatron.core.models.gpt.gpt_layer_specs as layer_specs
import megatron.core.optimizer
import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
import megatron.core.tensor_parallel.random as rng
import megatron.core.transformer.transformer_block as transformer_block
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from tepo_nemo.cpu import checkpoint
from tepo_nemo.cpu.optimizer import FusedAdam


def patch() -> None:
    """Complete Megatron-core's fallbacks. Its import, above, must come before any stand-in is importable."""
    layer_specs.LNImpl = transformer_block.LayerNormImpl = TorchNorm
    megatron.core.optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    # The name asks for an Adam that keeps `step` in the parameter group; FusedAdam does.
    distrib_optimizer.HAVE_APEX_OR_TE = True
    rng._set_cuda_rng_state = _set_rng_state
    checkpoint.patch()


class TorchNorm:
    """PyTorch's LayerNorm or RMSNorm for a layer specification, also under sequence parallelism.

    Each tensor-parallel rank then normalises its own part of the sequence: the gradient of its weight is
    partial. NeMo and Megatron-core add up the gradients of weights that are marked `sequence_parallel`; the
    norms of Apex and Transformer Engine mark theirs, and so does this one.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        unsharded = copy.copy(
            config
        )  # the wrapped class refuses sequence parallelism, having no mark to give
        unsharded.sequence_parallel = False
        norm = WrappedTorchNorm(unsharded, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)
