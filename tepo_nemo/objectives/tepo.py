"""TEPO: Token-Level Policy Optimization (arXiv 2604.12736)."""

import torch

from tepo_nemo.objectives.aggregation import Aggregation, aggregate
from tepo_nemo.objectives.contract import MinibatchTotals, Objective, ObjectiveOutput, TokenBatch
from tepo_nemo.objectives.divergence import KLEstimator, divergence
from tepo_nemo.objectives.entropy_mask import EntropyDrop, KLMask, kl_token_mask
from tepo_nemo.objectives.metrics import policy_metrics
from tepo_nemo.objectives.options import ClipWidth, Coefficient
from tepo_nemo.objectives.ratio import RatioGradient, RatioKind, importance_ratio
from tepo_nemo.objectives.registry import register
from tepo_nemo.objectives.surrogate import SurrogateForm, ppo_surrogate, printed_surrogate


@register("tepo")
class Tepo(Objective):
    """Eq. 4: a response-level ratio on every token, and a KL to the old policy on tokens that lose entropy.

        J = 1/sum_i |o_i| * sum_i sum_t [ min(w_i A, clip(w_i) A) - beta * KL(pi || pi_old) * M ]
        w_i = exp( 1/|o_i| * sum_t (logp - logp_old) ),   M = 1 where A > 0 and H - H_old < -tolerance

    L = -J is minimised. Neither H, H_old, M, A nor the clip decision carries gradient; `entropy_bonus` adds
    -lambda * H, the one term that differentiates H.
    """

    surrogate: SurrogateForm
    ratio: RatioKind
    ratio_gradient: RatioGradient
    clip_low: ClipWidth
    clip_high: ClipWidth
    kl_estimator: KLEstimator
    kl_coefficient: Coefficient
    kl_mask: KLMask
    entropy_drop: EntropyDrop
    entropy_drop_tolerance: Coefficient
    aggregation: Aggregation
    entropy_bonus: Coefficient

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_bonus > 0

    @property
    def needs_minibatch_statistics(self) -> bool:
        return self.kl_mask == "tepo" and self.entropy_drop == "covariance"

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        ratio = importance_ratio(tokens, self.ratio, self.ratio_gradient)
        clip = ppo_surrogate if self.surrogate == "ppo" else printed_surrogate
        surrogate = clip(ratio, tokens.advantages, self.clip_low, self.clip_high)

        kl = divergence(tokens.logprobs - tokens.old_logprobs, self.kl_estimator)
        kl_mask = kl_token_mask(
            tokens, self.kl_mask, self.entropy_drop, self.entropy_drop_tolerance, totals.statistics
        )

        loss = -surrogate.value + self.kl_coefficient * torch.where(kl_mask, kl, 0)
        if self.entropy_bonus > 0:
            loss = loss - self.entropy_bonus * tokens.entropy

        metrics = policy_metrics(tokens, ratio=ratio, clipped=surrogate.clipped, kl=kl, kl_mask=kl_mask)
        return ObjectiveOutput(aggregate(loss, tokens, totals, self.aggregation), metrics)
