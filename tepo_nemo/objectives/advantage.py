"""Group-relative advantages: how much better a response did than the others to the same prompt.

Taken over the whole rollout before it is sharded. Groups are found by id, never by position. Rewards whose
verifier failed are not valid: they neither vote nor get an advantage. R responses, any number of groups of
any sizes.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

AdvantageEstimator = Literal["group", "mean", "rloo", "gpg", "gpg_nonzero"]

STD_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor, group_ids: Tensor, valid: Tensor, estimator: AdvantageEstimator
) -> Tensor:
    """Advantage of each response, [R] float32, from rewards [R], int64 group ids [R] and a bool mask [R].

    With mean, std (unbiased) and n over the valid rewards of the response's group:

    - `group`: (R - mean) / (std + 1e-6), GRPO (arXiv 2402.03300)
    - `mean`: R - mean, Dr.GRPO (arXiv 2503.20783)
    - `rloo`: R - mean of the other n - 1 rewards (arXiv 2402.14740)
    - `gpg`: alpha (R - mean) with alpha = valid responses / those in groups with spread (arXiv 2504.02546)
    - `gpg_nonzero`: the same with alpha = valid responses / those with a reward other than 0

    Exactly 0 where the valid rewards of a group are all equal, fewer than two, or the response is not valid.

    Raises:
        ValueError: a valid reward is not finite.
    """
    rewards = rewards.to(torch.float64)
    if not torch.isfinite(rewards[valid]).all():
        raise ValueError(
            "a valid reward is NaN or infinite; a reward that could not be computed must not be valid"
        )
    groups = _group_statistics(rewards, group_ids, valid)
    counted = valid & groups.has_spread[groups.index]
    centred = torch.where(counted, rewards - groups.mean[groups.index], 0)
    match estimator:
        case "group":
            squares = torch.zeros_like(groups.mean).index_add_(0, groups.index, centred.square())
            std = (squares / (groups.count - 1).clamp(min=1)).sqrt()
            advantages = centred / (std[groups.index] + STD_EPSILON)
        case "mean":
            advantages = centred
        case "rloo":
            advantages = centred * (groups.count / (groups.count - 1).clamp(min=1))[groups.index]
        case "gpg":
            advantages = centred * valid.sum() / counted.sum().clamp(min=1)
        case "gpg_nonzero":
            advantages = centred * valid.sum() / (valid & (rewards != 0)).sum().clamp(min=1)
    return advantages.to(torch.float32)


def overlong_penalty(lengths: Tensor, max_response_length: int, fraction: float) -> Tensor:
    """What DAPO adds to the rewards of long responses (arXiv 2503.14476), [R] float64 from -1 to 0.

        min( -(|o| - (L_max - L_cache)) / L_cache, 0 ),   L_cache = fraction * L_max

    Args:
        lengths: |o|, [R] tokens.
        max_response_length: L_max, in tokens.
        fraction: from 0, which leaves every reward alone, to 1.
    """
    if fraction == 0:
        return torch.zeros_like(lengths, dtype=torch.float64)
    over = (lengths.to(torch.float64) - max_response_length) / (fraction * max_response_length) + 1
    return -over.clamp(min=0)


def zero_spread_fraction(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Share of groups that teach nothing (0-d float32): their valid rewards are all equal, or fewer than two.

    0 where there is no group at all.
    """
    has_spread = _group_statistics(rewards.to(torch.float64), group_ids, valid).has_spread
    return (~has_spread).sum().to(torch.float32) / max(has_spread.numel(), 1)


class _Groups(NamedTuple):
    index: Tensor  # [R] which of the N groups a response belongs to
    count: Tensor  # [N] float64, valid rewards
    mean: Tensor  # [N] float64, of the valid rewards
    has_spread: Tensor  # [N] bool, at least two valid rewards that differ


def _group_statistics(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> _Groups:
    """Spread is decided by max - min: rounding can leave a standard deviation of equal rewards above 0."""
    ids, index = torch.unique(group_ids, return_inverse=True)
    zeros = rewards.new_zeros(ids.numel())
    count = zeros.index_add(0, index, valid.to(rewards.dtype))
    mean = zeros.index_add(0, index, torch.where(valid, rewards, 0)) / count.clamp(min=1)
    highest = (zeros - torch.inf).scatter_reduce(0, index, torch.where(valid, rewards, -torch.inf), "amax")
    lowest = (zeros + torch.inf).scatter_reduce(0, index, torch.where(valid, rewards, torch.inf), "amin")
    return _Groups(index, count, mean, highest > lowest)
