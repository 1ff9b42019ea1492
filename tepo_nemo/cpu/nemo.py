"""Names that NeMo takes from Apex or Transformer Engine, and its calls that only a GPU can answer."""

from functools import partial
from typing import Any

import nemo.collections.nlp.models.language_modeling.megatron_gpt_model as gpt_model
import nemo.collections.nlp.modules.common.megatron.build_model as build_model
import nemo.collections.nlp.modules.common.megatron.clip_grads as clip_grads
import nemo.collections.nlp.modules.common.megatron.megatron_init as megatron_init
import nemo.collections.nlp.modules.common.megatron.utils as utils
import nemo.collections.nlp.parts.nlp_overrides as nlp_overrides
import nemo.core.optim
import nemo.core.optim.optimizers as optimizers
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    model_parallel_cuda_manual_seed,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from nemo.core.optim.mcore_optim import McoreDistributedOptimizer

from tepo_nemo.cpu import apex
from tepo_nemo.cpu.optimizer import FusedAdam


def patch() -> None:
    """Fill in NeMo's names. Its import, above, needs `transformer_engine.seat()` first."""
    _fill_in_apex()
    _fill_in_optimizers()
    gpt_model.get_specs = _local_specs
    gpt_model.MegatronGPTModel.cuda = lambda self, *_, **__: self  # Lightning's override builds a CUDA device
    nlp_overrides.NLPDDPStrategy._fix_tensors_device = lambda self, checkpoint: checkpoint
    megatron_init._set_random_seed = _seed_with_tracker(megatron_init._set_random_seed)


def _fill_in_apex() -> None:
    build_model.set_defaults_if_not_set_tensor_model_parallel_attributes = (
        set_defaults_if_not_set_tensor_model_parallel_attributes
    )
    utils.listify_model = apex.listify_model
    utils.FusedLayerNorm = utils.FastLayerNorm = torch.nn.LayerNorm
    utils.MixedFusedRMSNorm = torch.nn.RMSNorm
    clip_grads.multi_tensor_applier = apex.multi_tensor_applier
    clip_grads.amp_C = apex.amp_C


def _fill_in_optimizers() -> None:
    nlp_overrides.HAVE_APEX = True
    nlp_overrides.McoreDistributedOptimizer = McoreDistributedOptimizer
    nlp_overrides.MegatronDistributedFusedAdam = apex.DistributedFusedAdam
    optimizers.HAVE_APEX = True
    optimizers.FusedAdam = FusedAdam
    plain_get_optimizer = optimizers.get_optimizer

    def get_optimizer(name: str, **kwargs: Any) -> Any:
        # NeMo refuses this name without CUDA before it looks it up.
        return partial(FusedAdam, **kwargs) if name == "fused_adam" else plain_get_optimizer(name, **kwargs)

    nemo.core.optim.get_optimizer = optimizers.get_optimizer = get_optimizer


def _local_specs(*_: Any, **__: Any) -> Any:
    """Layers of plain Megatron-core. NeMo's own function builds those of every engine before it chooses."""
    return get_gpt_layer_local_spec()


def _seed_with_tracker(set_random_seed: Any) -> Any:
    """NeMo seeds Megatron-core's generator tracker only where it counts a GPU; it is read in any case."""

    def set_seed(seed: int) -> None:
        set_random_seed(seed)
        model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())

    return set_seed
