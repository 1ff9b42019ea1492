"""What an objective sees of a whole rollout, before it is shared out: R responses, T positions (padded)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RolloutTokens:
    """Per-token quantities of all responses of a step, in their order; the same on every rank.

    Position 0 is the first token of a response. Masked positions may come in holding anything, NaN included;
    inside they are 0. Nothing has a graph.
    """

    old_logprobs: Tensor
    """[R, T] log-probability of the sampled token under the weights that produced the rollout."""
    old_entropy: Tensor
    """[R, T] entropy in nats under the same weights."""
    advantages: Tensor
    """[R] what the rewards of its group make of each response; 0 without a verdict."""
    rewards: Tensor
    """[R] as they were graded, before any shaping by length; means nothing without a verdict."""
    groups: Tensor
    """[R] int64 group ids."""
    mask: Tensor
    """[R, T] bool, the trained tokens; none of a response without a verdict."""
    reference_logprobs: Tensor | None = None
    """[R, T] log-probability under the frozen reference; only where the objective `needs_reference`."""

    def __post_init__(self) -> None:
        assert self.mask.dtype == torch.bool and self.mask.dim() == 2, "mask must be a [R, T] bool tensor"
        for name in ("advantages", "rewards", "groups"):
            assert getattr(self, name).shape == self.mask.shape[:1], f"{name} must be [R]"
        for name in ("old_logprobs", "old_entropy", "reference_logprobs"):
            value = getattr(self, name)
            if value is not None:
                assert value.shape == self.mask.shape, f"{name} must be [R, T]"
                object.__setattr__(self, name, torch.where(self.mask, value, 0))

    @property
    def lengths(self) -> Tensor:
        """[R] trained tokens of each response, |o_i|."""
        return self.mask.sum(-1)
