"""The state of an optimizer as sharded tensors, which any layout can read, and one number.

Of Adam it is both moments, of the distributed optimizer the fp32 weights too, and of plain SGD nothing. All
hyperparameters are the configuration's; the count of updates stands once.
"""

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from nemo.core.optim.mcore_optim import McoreDistributedOptimizer
from torch import Tensor
from torch.optim import SGD, Optimizer

from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel

_MOMENTS = ("exp_avg", "exp_avg_sq")


def updates_of(optimizer: Optimizer) -> int:
    """Updates made so far, by which Adam corrects its moments; 0 for an optimizer that does not count."""
    counts = {int(group.get("step", 0)) for group in optimizer.param_groups if group["params"]}
    assert len(counts) == 1, f"parameter groups disagree about their updates: {counts}"
    return counts.pop()


def optimizer_tensors(actor: MegatronGPTTEPOActorModel, optimizer: Optimizer) -> ShardedStateDict:
    """This rank's part of the state; empty for an optimizer without any. Allocates it where that is due."""
    if isinstance(optimizer, SGD):
        return {}
    model = {name: value for name, value in actor.sharded_state_dict().items() if "_extra_state" not in name}
    if isinstance(optimizer, McoreDistributedOptimizer):
        inner = _distributed(optimizer)
        _allocate_distributed(inner)
        return inner.sharded_param_state_fs_model_space(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = get_param_id_to_sharded_param_map(model, iter(parameters))
    return {
        number: {
            name: make_sharded_optimizer_tensor(
                sharded[number], _moment(optimizer, parameter, name), prefix=f"optimizer.state.{name}"
            )
            for name in _MOMENTS
        }
        for number, parameter in enumerate(parameters)
    }


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, tensors: StateDict, updates: int) -> None:
    """Put the loaded values of `optimizer_tensors` in place."""
    for group in optimizer.param_groups:
        if updates or "step" in group:
            group["step"] = updates
    if isinstance(optimizer, SGD):
        return
    if isinstance(optimizer, McoreDistributedOptimizer):
        _distributed(optimizer).load_parameter_state_from_fs_model_space(tensors)
        return
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in enumerate(parameters):
        for name in _MOMENTS:
            _moment(optimizer, parameter, name).copy_(tensors[number][name])


def _moment(optimizer: Optimizer, parameter: Tensor, name: str) -> Tensor:
    """Zeros until the first update, as the optimizer itself would make them."""
    state = optimizer.state[parameter]
    if name not in state:
        state[name] = torch.zeros_like(parameter, dtype=torch.float32)
    return state[name]


def _distributed(optimizer: McoreDistributedOptimizer) -> DistributedOptimizer:
    inner = optimizer.mcore_optimizer
    chained = getattr(inner, "chained_optimizers", [inner])
    assert len(chained) == 1, "one distributed optimizer, as a model without experts has"
    return chained[0]


def _allocate_distributed(inner: DistributedOptimizer) -> None:
    if len(inner.optimizer.state) == 0:
        inner.load_state_dict(inner.state_dict())  # makes the moments, and fills them with anything
        for state in inner.optimizer.state.values():
            for name in _MOMENTS:
                state[name].zero_()
