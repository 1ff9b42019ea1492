"""Clipped policy-gradient surrogates, to be maximised, and the clip decision that the metrics count."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

SurrogateForm = Literal["ppo", "printed"]


class Surrogate(NamedTuple):
    """Per-token surrogate [S, T], and where the clip cut its gradient (bool [S, T], never with A = 0)."""

    value: Tensor
    clipped: Tensor


def ppo_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Surrogate:
    """min(w A, clip(w, 1 - clip_low, 1 + clip_high) A), PPO (arXiv 1707.06347, eq. 7).

    Cut are A > 0 with w > 1 + clip_high and A < 0 with w < 1 - clip_low. With `dual_clip` c (arXiv
    1912.09729) the surrogate of A < 0 is at least c A, which cuts w > c there too. All arguments [S, T] or
    broadcastable.
    """
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded * advantages < ratio * advantages
    if dual_clip is not None:
        too_large = (advantages < 0) & (ratio > dual_clip)
        bounded = torch.where(too_large, dual_clip, bounded)
        clipped = clipped | too_large
    return Surrogate(torch.where(clipped, bounded, ratio) * advantages, clipped)


def printed_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Surrogate:
    """min(w, clip(w, 1 - clip_low, 1 + clip_high)) A, as TEPO's eq. 4 prints it.

    Taken literally the minimum never raises w, so `clip_low` has no effect, and w > 1 + clip_high is cut
    whatever the sign of A.
    """
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped = bounded < ratio
    return Surrogate(torch.where(clipped, bounded, ratio) * advantages, clipped & (advantages != 0))
