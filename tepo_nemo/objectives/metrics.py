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
A ratio on the edge is not cut, nor a token with A = 0, which has no gradient to lose. Where no token is in
the KL mask, `kl/masked_mean` is 0 / 0: there is nothing to average.
"""

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import Mean, TokenBatch


def token_mean(values: Tensor, mask: Tensor) -> Mean:
    """Mean of `values` over the tokens of `mask`, both [S, T]; summed in float64, where counts are exact."""
    selected = torch.where(mask, values.detach().to(torch.float64), 0)
    return Mean(selected.sum(), mask.sum(dtype=torch.float64))


def policy_metrics(
    tokens: TokenBatch, *, ratio: Tensor, clipped: Tensor, kl: Tensor, kl_mask: Tensor
) -> dict[str, Mean]:
    """The table above, from the method's ratio, clip decision, KL estimate and KL mask, all [S, T]."""
    return {
        "ratio/mean": token_mean(ratio, tokens.mask),
        "ratio/clip_fraction": token_mean(clipped, tokens.mask),
        "kl/mean": token_mean(kl, tokens.mask),
        "kl/masked_mean": token_mean(kl, tokens.mask & kl_mask),
        "mask/fraction": token_mean(kl_mask, tokens.mask),
        "entropy/mean": token_mean(tokens.entropy, tokens.mask),
        "entropy/delta_mean": token_mean(tokens.entropy - tokens.old_entropy, tokens.mask),
    }
