"""MPO: Multi-token Policy Gradient Optimization (arXiv 2602.14386)."""

from typing import Annotated

import torch
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from tepo_nemo.objectives.aggregation import Aggregation, aggregate
from tepo_nemo.objectives.contract import MinibatchTotals, Objective, ObjectiveOutput, TokenBatch
from tepo_nemo.objectives.metrics import policy_metrics
from tepo_nemo.objectives.options import ClipWidth, Coefficient
from tepo_nemo.objectives.ratio import bound_log_ratio
from tepo_nemo.objectives.registry import register
from tepo_nemo.objectives.surrogate import ppo_surrogate


@register("mpo")
class Mpo(Objective):
    """PPO's clipped surrogate on a ratio over a window of K tokens, the token's own and the next ones; no KL.

        L = max(-A R, -A clip(R, 1 - clip_low, 1 + clip_high))
        log R_t = sum_{k=1..K} b_k log r_{t+k-1},   r = exp(logp - logp_old)
        b_k = b_2 lambda^(k-2) for k >= 2,   b_1 = 1 - sum_{k>=2} b_k

    K is `window`, b_2 is `next_weight`, lambda is `weight_decay`. At the end of a response the weights of the
    tokens that are left are scaled to sum to 1. The paper predicts the next tokens with heads of their own;
    here they are the response's, under teacher forcing. With K = 1 the ratio is GRPO's.
    """

    window: Annotated[int, Field(ge=1)]
    next_weight: Coefficient
    weight_decay: Coefficient
    clip_low: ClipWidth
    clip_high: ClipWidth
    aggregation: Aggregation

    @field_validator("weight_decay")
    @classmethod
    def _own_weight_is_positive(cls, weight_decay: float, info: ValidationInfo) -> float:
        """The last token of a response has nothing but its own weight to divide by."""
        if {"window", "next_weight"} <= info.data.keys():
            own = window_weights(info.data["window"], info.data["next_weight"], weight_decay)[0]
            if own <= 0:
                raise PydanticCustomError(
                    "window_weights",
                    "leaves the token itself a weight of {own}, which must be above 0 (lower next_weight, "
                    "weight_decay or window)",
                    {"own": f"{own:.3g}"},
                )
        return weight_decay

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        ratio = window_ratio(tokens, window_weights(self.window, self.next_weight, self.weight_decay))
        surrogate = ppo_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high)
        metrics = policy_metrics(tokens, ratio=ratio, clipped=surrogate.clipped)
        return ObjectiveOutput(aggregate(-surrogate.value, tokens, totals, self.aggregation), metrics)


def window_weights(window: int, next_weight: float, weight_decay: float) -> list[float]:
    """b_1 to b_K, which sum to 1."""
    following = [next_weight * weight_decay**k for k in range(window - 1)]
    return [1 - sum(following), *following]


def window_ratio(tokens: TokenBatch, weights: list[float]) -> Tensor:
    """Weighted geometric mean of the ratios of each token and the next ones of its response, [S, T].

    The next token is the next trained one: what lies masked in between does not count.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    responses, positions = log_ratio.shape
    # The trained tokens of a row move together to its front; the masked ones, all 0, go behind them.
    order = tokens.mask.cumsum(-1) - 1
    place = torch.where(tokens.mask, order, positions)
    packed = log_ratio.new_zeros(responses, positions + len(weights)).scatter(1, place, log_ratio)
    sums = sum(weight * packed[:, k : k + positions + 1] for k, weight in enumerate(weights))

    left = tokens.lengths.unsqueeze(-1) - order
    covered = sum(weight * (left > k).to(log_ratio.dtype) for k, weight in enumerate(weights))
    return torch.exp(bound_log_ratio(sums.gather(1, place) / covered))
