"""The layers of the model: NeMo's choice, and those with `qk_layernorm`, which NeMo never chooses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from nemo.collections.nlp.models.language_modeling import megatron_gpt_model


@contextmanager
def qk_layernorm_where_asked() -> Iterator[None]:
    """Build layers that normalise each head of queries and keys (Qwen3) where the configuration says so.

    NeMo's function for layers reads no such key.
    """
    nemos: Callable[..., ModuleSpec] = megatron_gpt_model.get_specs

    def get_specs(
        spec_name: str, transformer_config: TransformerConfig, use_te: bool = True, *others: Any
    ) -> ModuleSpec:
        if not transformer_config.qk_layernorm:
            return nemos(spec_name, transformer_config, use_te, *others)
        make = get_gpt_layer_with_transformer_engine_spec if use_te else get_gpt_layer_local_spec
        return make(qk_layernorm=True)

    with patch.object(megatron_gpt_model, "get_specs", get_specs):
        yield


def add_up_qk_layernorm_gradients(model: torch.nn.Module) -> None:
    """Sum them over tensor-parallel ranks, each of which has seen its own heads alone.

    Megatron-core's optimizer does so itself, and NeMo where the sequence is sharded, too.
    """
    gradients = [
        parameter.grad
        for name, parameter in model.named_parameters()
        if ("q_layernorm" in name or "k_layernorm" in name) and parameter.grad is not None
    ]
    if gradients:
        together = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(together, group=parallel_state.get_tensor_model_parallel_group())
        for gradient, values in zip(
            gradients, together.split([gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(values.view_as(gradient))
