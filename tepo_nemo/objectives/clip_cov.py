"""Clip-Cov: clipping by covariance (arXiv 2505.22617, "The Entropy Mechanism of Reinforcement Learning")."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from tepo_nemo.objectives.aggregation import Aggregation, aggregate
from tepo_nemo.objectives.contract import (
    MinibatchStatistics,
    MinibatchTotals,
    Objective,
    ObjectiveOutput,
    TokenBatch,
)
from tepo_nemo.objectives.covariance import token_covariance
from tepo_nemo.objectives.metrics import policy_metrics
from tepo_nemo.objectives.options import ClipWidth, SelectedFraction, selected_tokens
from tepo_nemo.objectives.ratio import importance_ratio
from tepo_nemo.objectives.registry import register
from tepo_nemo.objectives.surrogate import ppo_surrogate

CovarianceBound = Annotated[float, Field(allow_inf_nan=False)]


@register("clip_cov")
class ClipCov(Objective):
    """GRPO's clipped surrogate without a few random tokens of high covariance; no KL, no dual clip.

        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),   0 on the selected tokens
        r = exp(logp - logp_old),   Cov = (A - mean A)(logp - mean logp)

    Selected are max(1, int(selected_fraction * N)) of the mini-batch's N tokens, or all candidates where
    they are fewer: at random among those with covariance_low < Cov < covariance_high that the clip leaves
    alone. They keep their place in the denominator, and count as clipped in the metrics.

    verl 0.9.1 selects inside each micro-batch of a rank, by that one's means and count, and so at least one
    token in every micro-batch with a candidate; on a mini-batch that is one micro-batch the two agree.
    """

    selected_fraction: SelectedFraction
    covariance_low: CovarianceBound
    covariance_high: CovarianceBound
    clip_low: ClipWidth
    clip_high: ClipWidth
    aggregation: Aggregation

    needs_selection: ClassVar[bool] = True

    @field_validator("covariance_high")
    @classmethod
    def _interval_is_not_empty(cls, covariance_high: float, info: ValidationInfo) -> float:
        low = info.data.get("covariance_low")
        if low is not None and covariance_high <= low:
            raise PydanticCustomError(
                "covariance_interval", "it should be greater than covariance_low = {low}", {"low": low}
            )
        return covariance_high

    def selection_scores(self, tokens: TokenBatch, statistics: MinibatchStatistics, draws: Tensor) -> Tensor:
        ratio = importance_ratio(tokens, "token")
        clipped = ppo_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high).clipped
        covariance = token_covariance(tokens, statistics)
        candidates = (
            tokens.mask & (covariance > self.covariance_low) & (covariance < self.covariance_high) & ~clipped
        )
        return torch.where(candidates, draws, -torch.inf)

    def selection_count(self, tokens: int) -> int:
        return selected_tokens(self.selected_fraction, tokens)

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        assert tokens.selected is not None, "clip_cov needs the selected tokens"
        ratio = importance_ratio(tokens, "token")
        surrogate = ppo_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high)
        loss = torch.where(tokens.selected, 0, -surrogate.value)
        clipped = surrogate.clipped | (tokens.selected & (tokens.advantages != 0))
        metrics = policy_metrics(tokens, ratio=ratio, clipped=clipped)
        return ObjectiveOutput(aggregate(loss, tokens, totals, self.aggregation), metrics)
