"""GSPO and GSPO-token: Group Sequence Policy Optimization (arXiv 2507.18071)."""

from tepo_nemo.objectives.aggregation import Aggregation, aggregate
from tepo_nemo.objectives.contract import MinibatchTotals, Objective, ObjectiveOutput, TokenBatch
from tepo_nemo.objectives.metrics import policy_metrics
from tepo_nemo.objectives.options import ClipWidth
from tepo_nemo.objectives.ratio import RatioGradient, importance_ratio
from tepo_nemo.objectives.registry import register
from tepo_nemo.objectives.surrogate import ppo_surrogate


@register("gspo")
class Gspo(Objective):
    """PPO's clipped surrogate on one ratio a response, the geometric mean of its token ratios; no KL.

        J = 1/S sum_i 1/|o_i| sum_t min(s_i A, clip(s_i, 1 - clip_low, 1 + clip_high) A)
        s_i = exp( 1/|o_i| * sum_t (logp - logp_old) )

    L = -J is minimised. GSPO-token (eq. 13) is `stop_gradient`: sg[s_i] * pi / sg[pi] on each token. That is
    the form of verl 0.9.1; TRL 1.16.0 has the other. They differ where advantages vary inside a response.
    """

    ratio_gradient: RatioGradient
    clip_low: ClipWidth
    clip_high: ClipWidth
    aggregation: Aggregation

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        ratio = importance_ratio(tokens, "sequence-geometric", self.ratio_gradient)
        surrogate = ppo_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high)
        metrics = policy_metrics(tokens, ratio=ratio, clipped=surrogate.clipped)
        return ObjectiveOutput(aggregate(-surrogate.value, tokens, totals, self.aggregation), metrics)
