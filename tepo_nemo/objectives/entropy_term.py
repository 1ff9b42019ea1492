"""The entropy-based advantage term of "Reasoning with Exploration" (arXiv 2506.14758)."""

from typing import Annotated

import torch
from pydantic import Field

from tepo_nemo.objectives.aggregation import Aggregation, aggregate
from tepo_nemo.objectives.contract import MinibatchTotals, Objective, ObjectiveOutput, TokenBatch
from tepo_nemo.objectives.metrics import policy_metrics
from tepo_nemo.objectives.options import ClipWidth, Coefficient, DualClip
from tepo_nemo.objectives.ratio import importance_ratio
from tepo_nemo.objectives.registry import register
from tepo_nemo.objectives.surrogate import ppo_surrogate


@register("entropy_term")
class EntropyTerm(Objective):
    """GRPO's clipped surrogate on token ratios, with advantages that entropy raises; no KL.

        L = max(-A' r, -A' clip(r, 1 - clip_low, 1 + clip_high)),   r = exp(logp - logp_old)
        A' = A + min(alpha * sg[H], |A| / kappa)

    alpha is `entropy_coefficient`, kappa is `advantage_divisor`; kappa above 1 keeps the sign of A. H is the
    current entropy of the token, without gradient. For A < 0, `dual_clip` c bounds the first term by -A' c.
    """

    entropy_coefficient: Coefficient
    advantage_divisor: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    clip_low: ClipWidth
    clip_high: ClipWidth
    dual_clip: DualClip
    aggregation: Aggregation

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        term = torch.minimum(
            self.entropy_coefficient * tokens.entropy.detach(),
            tokens.advantages.abs() / self.advantage_divisor,
        )
        ratio = importance_ratio(tokens, "token")
        surrogate = ppo_surrogate(
            ratio, tokens.advantages + term, self.clip_low, self.clip_high, self.dual_clip
        )
        metrics = policy_metrics(tokens, ratio=ratio, clipped=surrogate.clipped)
        return ObjectiveOutput(aggregate(-surrogate.value, tokens, totals, self.aggregation), metrics)
