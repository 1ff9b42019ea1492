"""One optimizer step in each of the host's modes, with the gradient norm known before the weights move."""

import math

from nemo.collections.nlp.modules.common.megatron.clip_grads import clip_grad_norm_fp32
from nemo.core.optim.mcore_optim import McoreDistributedOptimizer
from torch.optim import Optimizer

from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel
from tepo_nemo.training.policy import UpdateResult


def clip_and_step(
    actor: MegatronGPTTEPOActorModel, optimizer: Optimizer, *, learning_rate: float, gradient_clip: float
) -> UpdateResult:
    """Clip to a global norm of `gradient_clip` (0: no clipping) and step; skip a gradient that is not finite.

    The norm is the same on every rank, and so is the decision.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    clip = gradient_clip or math.inf
    if isinstance(optimizer, McoreDistributedOptimizer):
        # Its own step() clips and steps at once and looks at nothing: take it apart.
        inner = optimizer.mcore_optimizer
        inner.prepare_grads()
        grad_norm = float(inner.clip_grad_norm(clip))
        step = inner.step_with_ready_grads
    else:
        grad_norm = float(clip_grad_norm_fp32(actor.get_parameters_with_grad(), clip))
        step = optimizer.step
    if not math.isfinite(grad_norm):
        return UpdateResult(grad_norm, skipped=True)
    step()
    return UpdateResult(grad_norm, skipped=False)
