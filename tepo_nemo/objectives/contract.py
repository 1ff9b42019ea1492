"""What an objective takes and gives back. S responses, T response positions (padded), one micro-batch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from tepo_nemo.objectives.rollout import RolloutTokens


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Per-token quantities of one micro-batch. A response is never split over two of them.

    Masked positions may come in holding anything, NaN included; inside they are 0, and their gradient is 0,
    because 0 * NaN is NaN and a mask applied later could not undo it. Only `logprobs` and `entropy` keep
    their graph.

    With `token_weights` c the gradient that reaches the log-probability and the entropy of token t is
    multiplied by c_t, whatever the objective makes of them; `aggregate` weighs the value of the loss alike.
    """

    logprobs: Tensor
    """[S, T] log-probability of the sampled token under the current weights, with gradient."""
    entropy: Tensor
    """[S, T] entropy in nats; has a gradient only where the objective declares `needs_entropy_gradient`."""
    old_logprobs: Tensor
    """[S, T] the same log-probability under the weights that produced the rollout."""
    old_entropy: Tensor
    """[S, T] entropy in nats under the weights that produced the rollout."""
    advantages: Tensor
    """[S, T] the same value over a response unless a method shapes it per token."""
    mask: Tensor
    """[S, T] bool, the trained tokens: with the stop token; no prompt, padding or unscorable response."""
    group_tokens: Tensor
    """[S] trained tokens of the response's whole group inside the mini-batch."""
    reference_logprobs: Tensor | None = None
    """[S, T] log-probability under the frozen reference; only where the objective `needs_reference`."""
    selected: Tensor | None = None
    """[S, T] bool, the mini-batch's tokens that are selected; only where the objective `needs_selection`."""
    token_weights: Tensor | None = None
    """[S, T] what corrects for a sampler that is not the old policy, finite and not negative; None is 1."""

    def __post_init__(self) -> None:
        assert self.mask.dtype == torch.bool and self.mask.dim() == 2, "mask must be a [S, T] bool tensor"
        assert self.group_tokens.shape == self.mask.shape[:1], "group_tokens must be [S]"
        self._zero_masked("logprobs", "entropy")
        self._zero_masked("old_logprobs", "old_entropy", "advantages", detach=True)
        if self.reference_logprobs is not None:
            self._zero_masked("reference_logprobs", detach=True)
        if self.selected is not None:
            assert self.selected.dtype == torch.bool and self.selected.shape == self.mask.shape, (
                "selected must be a bool tensor of the mask's shape"
            )
        if self.token_weights is not None:
            self._zero_masked("token_weights", detach=True)
            for name in ("logprobs", "entropy"):
                weighted = _weigh_gradient(getattr(self, name), self.token_weights)
                object.__setattr__(self, name, weighted)

    def _zero_masked(self, *names: str, detach: bool = False) -> None:
        for name in names:
            value = getattr(self, name)
            assert value.shape == self.mask.shape, (
                f"{name} is {tuple(value.shape)}, mask {tuple(self.mask.shape)}"
            )
            value = torch.where(self.mask, value.detach() if detach else value, 0)
            object.__setattr__(self, name, value)

    @property
    def lengths(self) -> Tensor:
        """[S] trained tokens of each response, |o_i|; 0 for an empty or fully masked one."""
        return self.mask.sum(-1)


def _weigh_gradient(values: Tensor, weights: Tensor) -> Tensor:
    """The values, to the bit; their gradient is multiplied, and 0 where the weight is, even of a NaN."""
    constant = values.detach()
    return torch.where(weights > 0, constant + weights * (values - constant), constant)


@dataclass(frozen=True, eq=False)
class MinibatchStatistics:
    """Means (0-d) over the valid tokens of the whole mini-batch, under the weights before the update."""

    advantage_mean: Tensor
    logprob_mean: Tensor


@dataclass(frozen=True, eq=False)
class MinibatchTotals:
    """Counts over the mini-batch, all its micro-batches and data-parallel ranks, before the first forward."""

    tokens: int
    """Valid tokens."""
    responses: int
    """Responses with at least one valid token."""
    groups: int
    """Groups with at least one valid token."""
    max_response_length: int
    """The configured maximum, in tokens."""
    statistics: MinibatchStatistics | None = None
    """Only where the objective declares `needs_minibatch_statistics`."""


@dataclass(frozen=True, eq=False)
class Mean:
    """A metric with its denominator: 0-d detached tensors, both of which add over micro-batches and ranks.

    The denominator of the sum may be 0, where nothing was there to average.
    """

    numerator: Tensor
    denominator: Tensor


class ObjectiveOutput(NamedTuple):
    """The micro-batch's share of the loss (0-d, always attached to the graph; shares add) and its metrics."""

    loss: Tensor
    metrics: dict[str, Mean]


class Objective(BaseModel, ABC):
    """A method: its fields are the options under `algorithm.*`, its call is the loss.

    Options have no default here: a default stands in the method's preset. A subclass overrides the `needs_*`
    declarations with a property, where an option decides, or with a class variable. A call reads nothing but
    its arguments, communicates with nobody and never waits for the device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @property
    def needs_reference(self) -> bool:
        """Whether `TokenBatch.reference_logprobs` must be given."""
        return False

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss differentiates `TokenBatch.entropy`."""
        return False

    @property
    def needs_minibatch_statistics(self) -> bool:
        """Whether `MinibatchTotals.statistics` must be given: a forward-only pass before each update."""
        return self.needs_selection

    @property
    def needs_selection(self) -> bool:
        """Whether `TokenBatch.selected` must be given: the same pass, and the two functions below."""
        return False

    @property
    def shapes_advantages(self) -> bool:
        """Whether `shape_advantages` is to be called: the first mini-batch of a rollout then needs a
        forward-only pass too."""
        return False

    def shape_advantages(self, rollout: RolloutTokens) -> Tensor:
        """Advantages of the tokens of a whole rollout, [R, T]; what stands on masked ones does not matter.

        Called once a rollout, before its first update, and on the host. Only where `shapes_advantages`.
        """
        raise NotImplementedError

    def selection_scores(self, tokens: TokenBatch, statistics: MinibatchStatistics, draws: Tensor) -> Tensor:
        """How eligible each token is under the weights before the update, [S, T]; -inf where it is not.

        Args:
            draws: [S, T] uniform in [0, 1), independent of each other; a function of the seed, the step, the
                response and the position of the token.
        """
        raise NotImplementedError

    def selection_count(self, tokens: int) -> int:
        """How many of the mini-batch's valid tokens are selected: those of the highest scores."""
        raise NotImplementedError

    @abstractmethod
    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        """Loss share and metrics of one micro-batch."""
