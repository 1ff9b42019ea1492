"""One optimizer step in each of the host's modes, with the gradient norm known before the weights move."""

import math

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from nemo.collections.nlp.modules.common.megatron.clip_grads import clip_grad_norm_fp32
from nemo.core.optim.mcore_optim import McoreDistributedOptimizer
from torch import Tensor
from torch.optim import Optimizer

from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel
from tepo_nemo.parallel.finite import first_ranks_not_finite
from tepo_nemo.training.policy import Gradient


def clip_gradient(
    actor: MegatronGPTTEPOActorModel,
    optimizer: Optimizer,
    *,
    gradient_clip: float,
    loss: Tensor | None,
    ratio: Tensor | None,
) -> Gradient:
    """Clip to a global norm of `gradient_clip` (0: no clipping).

    The host waits for the norm, and for one small reduction over the world more.

    Args:
        loss, ratio: this rank's shares, 0-d; None where it has none.
    """
    clip = gradient_clip or math.inf
    if isinstance(optimizer, McoreDistributedOptimizer):
        # Its own step() clips and steps at once and looks at nothing: take it apart.
        inner = optimizer.mcore_optimizer
        inner.prepare_grads()
        copies = _norm_of_copies(optimizer)
        norm = float(inner.clip_grad_norm(clip))
    else:
        copies = _norm_of_copies(optimizer)  # before a norm that is not finite scales all of them
        norm = float(clip_grad_norm_fp32(actor.get_parameters_with_grad(), clip))
    watched = {"loss": loss, "ratio": ratio, "copies": copies, "norm": norm}
    return Gradient(norm, first_ranks_not_finite(watched, dist.group.WORLD))


def _norm_of_copies(optimizer: Optimizer) -> Tensor | None:
    """Of the gradients that the norm leaves out, since another rank has the same weight: norms of layers."""
    copies = [
        parameter.grad.detach().norm()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
        and not (param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter))
    ]
    return torch.stack(copies).sum() if copies else None


def step(optimizer: Optimizer, learning_rate: float) -> None:
    """Move the weights by the gradient that `clip_gradient` has left."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    if isinstance(optimizer, McoreDistributedOptimizer):
        optimizer.mcore_optimizer.step_with_ready_grads()
    else:
        optimizer.step()
