"""Importance ratios between the current policy and the one that produced the rollout.

GRPO's token ratio and TEPO's and GSPO's response ratio are one family: exp of a weighted sum of token
log-ratios.
"""

from typing import Literal

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import TokenBatch

RatioKind = Literal["token", "sequence-geometric", "sequence-product", "none"]
RatioGradient = Literal["full", "stop_gradient"]

LOG_RATIO_LIMIT = 20.0


def bound_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamps a log-ratio to [-20, 20], with gradient 0 beyond.

    This must happen before the exponential: clamping its result leaves the value finite and the gradient NaN.
    """
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance_ratio(tokens: TokenBatch, kind: RatioKind, gradient: RatioGradient = "full") -> Tensor:
    """The ratio that weights each token's advantage, [S, T]; a response ratio is repeated over its tokens.

    With d = logp - logp_old on the trained tokens of response i:

    - `token`: r = exp(d_t)
    - `sequence-geometric`: w = exp(1/|o_i| sum_t d_t), TEPO and GSPO (arXiv 2507.18071, eq. 7)
    - `sequence-product`: exp(sum_t d_t), the likelihood ratio of the whole response
    - `none`: pi / sg[pi], value 1, the plain policy gradient

    `stop_gradient` keeps the value and sends each token's gradient through its own log-probability alone,
    sg[w] * pi / sg[pi] (GSPO-token). For w it equals `full` as long as the advantage is constant over the
    response.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    own = tokens.logprobs - tokens.logprobs.detach()
    match kind:
        case "token":
            log_weight = log_ratio
        case "sequence-geometric":
            log_weight = log_ratio.sum(-1, keepdim=True) / tokens.lengths.clamp(min=1).unsqueeze(-1)
        case "sequence-product":
            log_weight = log_ratio.sum(-1, keepdim=True)
        case "none":
            log_weight = own
    if gradient == "stop_gradient":
        log_weight = log_weight.detach() + own
    return torch.exp(bound_log_ratio(log_weight)).expand_as(log_ratio)
