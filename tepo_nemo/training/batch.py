"""What flows through the updates of a step, one type a station:

    `ScoredBatch` -> `TrainBatch` -> `MiniBatch` -> `MicroBatch`

Shapes: ``R`` responses of a step, ``S`` responses of a micro-batch, ``T`` response positions, ``L`` positions
of prompt and response together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import Mean, MinibatchTotals, TokenBatch
from tepo_nemo.rollout.correction import RolloutCorrection


@dataclass(frozen=True)
class TrainBatch:
    """Everything that the updates of a step need, before sharding; the same on every rank."""

    prompt_tokens: Sequence[Sequence[int]]  # R
    response_tokens: Tensor  # [R, T] int64
    response_lengths: Tensor  # [R] int64; 0 where a response is not trained on
    groups: Tensor  # [R] int64
    advantages: Tensor  # [R] fp32
    sampled_logprobs: Tensor | None = None  # [R, T] fp32, the sampler's own; None where nothing was sampled

    def __len__(self) -> int:
        return len(self.groups)


class TokenStatistics(NamedTuple):
    """Log-prob of each target and entropy, from one forward, fp32 [S, L] each."""

    logprobs: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Whole responses that pass the model at once, already shifted: position l predicts `targets[:, l]`.

    ``n`` are the trained tokens of all of them.
    """

    inputs: Tensor  # [S, L] int64
    targets: Tensor  # [S, L] int64, the next token of each input
    mask: Tensor  # [S, L] bool, True where the target is a response token that is trained on
    lengths: Tensor  # [S] int64, positions up to the last trained target; stays on the host
    positions: Tensor  # [n] int64, where the mask is True in a flat [S * L]; found on the host
    advantages: Tensor  # [S, L] fp32
    group_tokens: Tensor  # [S] fp32, trained tokens of the response's group in the mini-batch
    rows: Tensor  # [S] int64, row of the `TrainBatch`; -1 where a micro-batch is empty
    sampled_logprobs: Tensor | None = None  # [S, L] fp32, the sampler's own
    old: TokenStatistics | None = None  # None: the current weights are the old ones
    reference_logprobs: Tensor | None = None  # [S, L] fp32, under the frozen reference policy
    selected: Tensor | None = None  # [S, L] bool, only where the objective `needs_selection`

    def with_old(self, old: TokenStatistics) -> "MicroBatch":
        """The same micro-batch with the statistics of the weights that made the rollout."""
        return replace(self, old=old)

    def token_batch(
        self, current: TokenStatistics, correction: RolloutCorrection | None = None
    ) -> TokenBatch:
        """What an objective is given, on the device of `current`, with the weights of a correction."""
        old = self.old or current
        weights = None
        if correction is not None and self.sampled_logprobs is not None:
            weights = correction.weights(old.logprobs, self.sampled_logprobs, self.mask)
        return TokenBatch(
            logprobs=current.logprobs,
            entropy=current.entropy,
            old_logprobs=old.logprobs,
            old_entropy=old.entropy,
            advantages=self.advantages,
            mask=self.mask,
            group_tokens=self.group_tokens,
            reference_logprobs=self.reference_logprobs,
            selected=self.selected,
            token_weights=weights,
        )

    def spread(self, values: Tensor) -> Tensor:
        """Values of the trained tokens, [n], at their places in [S, L]; 0 elsewhere."""
        flat = values.new_zeros(self.mask.numel()).index_copy(0, self.positions.to(values.device), values)
        return flat.view(self.mask.shape)

    def by_response(self, values: Tensor, width: int) -> Tensor:
        """Values [S, L] of the trained tokens by response and column in it, [S, width], 0 elsewhere; on the
        host."""
        row, position, column = self._trained_places()
        values = values.cpu()
        responses = values.new_zeros(len(self.rows), width)
        responses[row, column] = values[row, position]
        return responses

    def of_responses(self, whole: Tensor) -> Tensor:
        """The inverse: [S, L] of this micro-batch from the [R, T] of all responses, 0 where nothing is
        trained."""
        row, position, column = self._trained_places()
        values = whole.new_zeros(self.mask.shape)
        values[row, position] = whole[self.rows[row], column]
        return values

    def _trained_places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each trained token, [n] each: row and position here, column in the response."""
        row, position = self.mask.nonzero(as_tuple=True)
        return row, position, self.mask.cumsum(1)[row, position] - 1

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch with its tensors on `device`; the host does not wait for the copies."""

        def move(value: Tensor | None) -> Tensor | None:
            if value is None or value.device == device:
                return value
            return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)

        return MicroBatch(
            inputs=move(self.inputs),
            targets=move(self.targets),
            mask=move(self.mask),
            lengths=self.lengths,
            positions=move(self.positions),
            advantages=move(self.advantages),
            group_tokens=move(self.group_tokens),
            rows=self.rows,
            sampled_logprobs=move(self.sampled_logprobs),
            old=None if self.old is None else TokenStatistics(*map(move, self.old)),
            reference_logprobs=move(self.reference_logprobs),
            selected=move(self.selected),
        )


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer update: this rank's micro-batches and the totals over all ranks."""

    micro_batches: Sequence[MicroBatch]  # of shapes of their own, the same number on every data-parallel rank
    totals: MinibatchTotals


def add_means(into: dict[str, Mean], metrics: dict[str, Mean]) -> None:
    """Add numerators and denominators of `metrics` to `into`."""
    for name, mean in metrics.items():
        if name in into:
            mean = Mean(into[name].numerator + mean.numerator, into[name].denominator + mean.denominator)
        into[name] = mean
