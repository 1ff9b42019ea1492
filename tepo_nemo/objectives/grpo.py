"""GRPO (arXiv 2402.03300) and, by its options, DAPO (arXiv 2503.14476) and Dr.GRPO (arXiv 2503.20783)."""

from tepo_nemo.objectives.aggregation import Aggregation, aggregate
from tepo_nemo.objectives.contract import MinibatchTotals, Objective, ObjectiveOutput, TokenBatch
from tepo_nemo.objectives.divergence import KLEstimator, divergence
from tepo_nemo.objectives.metrics import policy_metrics, token_mean
from tepo_nemo.objectives.options import ClipWidth, Coefficient, DualClip
from tepo_nemo.objectives.ratio import importance_ratio
from tepo_nemo.objectives.registry import register
from tepo_nemo.objectives.surrogate import ppo_surrogate


@register("grpo")
class Grpo(Objective):
    """PPO's clipped surrogate on token ratios with group advantages, and a KL to a frozen reference policy.

        L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + beta * KL(pi || pi_ref)
        r = exp(logp - logp_old)

    For A < 0, `dual_clip` c bounds the first term by -A c.
    """

    clip_low: ClipWidth
    clip_high: ClipWidth
    dual_clip: DualClip
    kl_estimator: KLEstimator
    kl_coefficient: Coefficient
    aggregation: Aggregation

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        ratio = importance_ratio(tokens, "token")
        surrogate = ppo_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high, self.dual_clip)
        metrics = policy_metrics(
            tokens,
            ratio=ratio,
            clipped=surrogate.clipped,
            kl=divergence(tokens.logprobs - tokens.old_logprobs, self.kl_estimator),
        )

        loss = -surrogate.value
        if self.kl_coefficient > 0:
            assert tokens.reference_logprobs is not None, "a KL to the reference needs its log-probabilities"
            reference_kl = divergence(tokens.logprobs - tokens.reference_logprobs, self.kl_estimator)
            loss = loss + self.kl_coefficient * reference_kl
            metrics["kl/reference_mean"] = token_mean(reference_kl, tokens.mask)
        return ObjectiveOutput(aggregate(loss, tokens, totals, self.aggregation), metrics)
