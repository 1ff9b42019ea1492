"""KL-Cov: a KL by covariance (arXiv 2505.22617, "The Entropy Mechanism of Reinforcement Learning")."""

import torch
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
from tepo_nemo.objectives.divergence import divergence
from tepo_nemo.objectives.metrics import policy_metrics
from tepo_nemo.objectives.options import Coefficient, SelectedFraction, selected_tokens
from tepo_nemo.objectives.ratio import importance_ratio
from tepo_nemo.objectives.registry import register


@register("kl_cov")
class KlCov(Objective):
    """Token ratios without a clip, and a KL to the old policy on the tokens of highest covariance.

        L = -A r + coef * |logp - logp_old| on the selected tokens,   -A r on all others
        r = exp(logp - logp_old),   Cov = (A - mean A)(logp - mean logp)

    Selected are the max(1, int(selected_fraction * N)) of the mini-batch's N tokens with the largest Cov, the
    earlier response and token among equals; in the metrics they are the KL mask. coef is `kl_coefficient`;
    with 0 nothing has to be selected.

    verl 0.9.1 selects inside each micro-batch of a rank, by that one's means and count, and so at least one
    token in every micro-batch; on a mini-batch that is one micro-batch the two agree, but for ties.
    """

    selected_fraction: SelectedFraction
    kl_coefficient: Coefficient
    aggregation: Aggregation

    @property
    def needs_selection(self) -> bool:
        return self.kl_coefficient > 0

    def selection_scores(self, tokens: TokenBatch, statistics: MinibatchStatistics, draws: Tensor) -> Tensor:
        return torch.where(tokens.mask, token_covariance(tokens, statistics), -torch.inf)

    def selection_count(self, tokens: int) -> int:
        return selected_tokens(self.selected_fraction, tokens)

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        ratio = importance_ratio(tokens, "token")
        kl = divergence(tokens.logprobs - tokens.old_logprobs, "abs")
        loss = -tokens.advantages * ratio
        if self.kl_coefficient > 0:
            assert tokens.selected is not None, "kl_cov needs the selected tokens"
            loss = loss + self.kl_coefficient * torch.where(tokens.selected, kl, 0)
        metrics = policy_metrics(tokens, ratio=ratio, kl=kl, kl_mask=tokens.selected)
        return ObjectiveOutput(aggregate(loss, tokens, totals, self.aggregation), metrics)
