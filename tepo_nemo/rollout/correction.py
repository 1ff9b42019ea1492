"""Correction for a rollout engine that is not quite the policy under training.

Tokens are drawn by the engine, from mu; the trainer recomputes their log-probs before the first update, as
log pi_old. Per token D_t = log pi_old - log mu, bounded to [-20, 20]. With a correction on, the loss is

    L = sum_t c_t l_t / (the denominator without a correction)

where l_t is the objective's own term of token t (surrogate outside of its min and clip, KL, entropy) and c_t
has no gradient. It is taken once a rollout, from the old log-probs, whatever the updates do.

- `truncated`: c_t = min(exp(D_t), C), truncated importance sampling
- `icepop`:    c_t = exp(D_t) where low <= exp(D_t) <= high, and 0 elsewhere: such tokens are dropped
- responses whose mean |D_t| is above a limit are dropped whole. A mean of absolute values does not shrink
  with the length, as the geometric mean of the ratios does: no length is dropped more readily than another

There is no weight of a response that is the product of its tokens': over thousands of tokens it is noise.

Where a ratio joins a response's tokens (TEPO, GSPO), its terms depend on all of their log-probs, and to weigh
the terms would give each token the mean of the weights. The gradient is weighed instead, in the stop-gradient
form of the ratio: what flows to log pi_t is multiplied by c_t (`TokenBatch.token_weights`), so that token t
has the gradient of c_t sg[w_i] pi_t / sg[pi_t]. For a ratio of the token alone both are one and the same.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

TokenWeight = Literal["none", "truncated", "icepop"]
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class RolloutCorrection:
    """See above; `response_gap_limit` None drops no response."""

    token_weight: TokenWeight
    truncation: float
    icepop_low: float
    icepop_high: float
    response_gap_limit: float | None

    @property
    def is_on(self) -> bool:
        return self.token_weight != "none" or self.response_gap_limit is not None

    @torch.no_grad()
    def weights(self, old_logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor) -> Tensor:
        """c [S, L] of the tokens that the mask marks; 0 on all others. A response is one row.

        Args:
            old_logprobs, sampled_logprobs, mask: [S, L] each; anything where the mask is False.
        """
        gap = torch.where(mask, old_logprobs - sampled_logprobs, 0)
        gap = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = gap.exp()
        match self.token_weight:
            case "none":
                weights = torch.ones_like(ratio)
            case "truncated":
                weights = ratio.clamp(max=self.truncation)
            case "icepop":
                inside = (ratio >= self.icepop_low) & (ratio <= self.icepop_high)
                weights = torch.where(inside, ratio, 0)
        if self.response_gap_limit is not None:
            mean_gap = gap.abs().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
            weights = torch.where(mean_gap <= self.response_gap_limit, weights, 0)
        return torch.where(mask, weights, 0)
