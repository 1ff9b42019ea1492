"""The metrics that every objective returns, each with its denominator.

"Tokens" are the trained tokens of the mini-batch. A response ratio counts once for each of its tokens.

| metric                | numerator: sum over                                    | denominator            |
|-----------------------|--------------------------------------------------------|------------------------|
| `ratio/mean`          | tokens, of the ratio that the method uses              | tokens                 |
| `ratio/clip_fraction` | tokens whose gradient the clip cut, of 1               | tokens                 |
| `kl/mean`             | tokens, of the method's estimate of KL(current, old)   | tokens                 |
| `kl/masked_mean`      | tokens in the KL mask, of the same estimate            | tokens in the KL mask  |
| `mask/fraction`       | tokens in the KL mask, of 1                            | tokens                 |
| `entropy/mean`        | tokens, of the current entropy in nats                 | tokens                 |
| `entropy/delta_mean`  | tokens, of current minus old entropy in nats           | tokens                 |
| `kl/reference_mean`   | tokens, of KL(current, reference); GRPO with it only   | tokens                 |

What the clip cuts: with the PPO surrogate A > 0 and ratio > 1 + clip_high, A < 0 and ratio < 1 - clip_low,
and with a dual clip c also A < 0 and ratio > c; with the printed surrogate A != 0 and ratio > 1 + clip_high.
A ratio on the edge is not cut, nor a token with A = 0, which has no gradient to lose. What Clip-Cov selects
is cut, too; what KL-Cov selects is its KL mask. Where no token is in the KL mask, `kl/masked_mean` is 0 / 0:
there is nothing to average.

What a method does not have is measured all the same: without a ratio the token ratio, without an estimator
k3; and without a clip or a KL mask nothing is cut or masked.
"""

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import Mean, TokenBatch
from tepo_nemo.objectives.divergence import divergence
from tepo_nemo.objectives.ratio import importance_ratio


def token_mean(values: Tensor, mask: Tensor) -> Mean:
    """Mean of `values` over the tokens of `mask`, both [S, T]; summed in float64, where counts are exact."""
    selected = torch.where(mask, values.detach().to(torch.float64), 0)
    return Mean(selected.sum(), mask.sum(dtype=torch.float64))


def policy_metrics(
    tokens: TokenBatch,
    *,
    ratio: Tensor | None = None,
    clipped: Tensor | None = None,
    kl: Tensor | None = None,
    kl_mask: Tensor | None = None,
) -> dict[str, Mean]:
    """The table above, from what the method has of ratio, clip decision, KL estimate and KL mask, [S, T]."""
    nothing = torch.zeros_like(tokens.mask)
    ratio = importance_ratio(tokens, "token") if ratio is None else ratio
    clipped = nothing if clipped is None else clipped
    kl = divergence(tokens.logprobs - tokens.old_logprobs, "k3") if kl is None else kl
    kl_mask = nothing if kl_mask is None else kl_mask
    return {
        "ratio/mean": token_mean(ratio, tokens.mask),
        "ratio/clip_fraction": token_mean(clipped, tokens.mask),
        "kl/mean": token_mean(kl, tokens.mask),
        "kl/masked_mean": token_mean(kl, tokens.mask & kl_mask),
        "mask/fraction": token_mean(kl_mask, tokens.mask),
        "entropy/mean": token_mean(tokens.entropy, tokens.mask),
        "entropy/delta_mean": token_mean(tokens.entropy - tokens.old_entropy, tokens.mask),
    }
