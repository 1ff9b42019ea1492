"""A rollout made of numbers, not of a model: every layout trains on the very same one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from support.toy import FIRST_CHARACTER, STOP_TOKEN, VOCABULARY
from torch import Tensor

from tepo_nemo.training.balance import MicroBatchLimits
from tepo_nemo.training.batch import MicroBatch, MiniBatch, TokenStatistics, TrainBatch
from tepo_nemo.training.minibatch import build_mini_batches

if TYPE_CHECKING:
    from tepo_nemo.nemo.policy import MegatronPolicy

GROUPS, GROUP_SIZE, RESPONSES_PER_UPDATE = 12, 4, 16
LONGEST_RESPONSE = 12
ZERO_GROUP, MASKED_RESPONSE = 1, 9  # both in the first mini-batch; the response is in another group


@dataclass(frozen=True)
class Rows:
    """Log-prob and entropy of response tokens, [R, T] each; 0 past a response's end."""

    logprobs: Tensor
    entropy: Tensor


# Log-probs and entropies of a rank's responses, by row of the batch.
Found = dict[int, tuple[Tensor, Tensor]]


def synthetic_batch() -> TrainBatch:
    """Prompts of 2 to 9 tokens, responses of 1 to 12, advantages of both signs, a group of zeros, and a
    response that is not trained on."""
    random = torch.Generator().manual_seed(3)

    def tokens(count: int) -> Tensor:
        return torch.randint(FIRST_CHARACTER, VOCABULARY, (count,), generator=random)

    prompts = [tokens(int(torch.randint(2, 10, (), generator=random))).tolist() for _ in range(GROUPS)]
    groups = torch.arange(GROUPS).repeat_interleave(GROUP_SIZE)
    lengths = torch.randint(1, LONGEST_RESPONSE + 1, (len(groups),), generator=random)
    responses = tokens(len(groups) * LONGEST_RESPONSE).view(len(groups), LONGEST_RESPONSE)
    ended = torch.rand(len(groups), generator=random) < 0.7
    responses[ended, lengths[ended] - 1] = STOP_TOKEN
    # Two up and two down in a group. Not centred: a loss that is a small difference of large terms would have
    # no accurate digits to compare.
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0]) * (
        0.5 + 0.5 * torch.rand(GROUPS, GROUP_SIZE, generator=random)
    )
    advantages[ZERO_GROUP] = 0
    lengths[MASKED_RESPONSE] = 0
    return TrainBatch(
        [prompts[group] for group in groups.tolist()], responses, lengths, groups, advantages.flatten()
    )


def disturbed(start: Rows, lengths: Tensor) -> Rows:
    """Old statistics for weights at which the statistics are `start`.

    The mean log-ratio of a response is near +-0.1 or +-0.35, so that some are clipped on either side and none
    is near the clip; its tokens scatter around that by 0.3. Entropies are 0.05 to 0.1 higher or lower.
    """
    random = torch.Generator().manual_seed(12)
    rows, width = start.logprobs.shape
    within = torch.arange(width) < lengths[:, None]
    group, member = torch.arange(rows) // GROUP_SIZE, torch.arange(rows) % GROUP_SIZE
    levels = torch.tensor([-0.35, -0.1, 0.1, 0.35])[(group + member) % 4]
    levels = levels + 0.02 * torch.rand(rows, generator=random)
    scatter = 0.3 * torch.randn(rows, width, generator=random) * within
    scatter -= scatter.sum(dim=1, keepdim=True) / lengths.clamp(min=1)[:, None]
    size = 0.05 + 0.05 * torch.rand(rows, width, generator=random)
    sign = torch.randint(2, (rows, width), generator=random) * 2 - 1
    return Rows(
        torch.where(within, start.logprobs - levels[:, None] - scatter, 0),
        torch.where(within, start.entropy + sign * size, 0),
    )


def first_rows(batch: TrainBatch, old: Rows | None, count: int) -> tuple[TrainBatch, Rows | None]:
    """The first `count` responses alone."""
    part = TrainBatch(
        batch.prompt_tokens[:count],
        batch.response_tokens[:count],
        batch.response_lengths[:count],
        batch.groups[:count],
        batch.advantages[:count],
    )
    return part, None if old is None else Rows(old.logprobs[:count], old.entropy[:count])


def with_lengths(batch: TrainBatch, lengths: dict[int, int]) -> TrainBatch:
    """Some responses shorter, or of length 0: not trained on."""
    changed = batch.response_lengths.clone()
    for row, length in lengths.items():
        changed[row] = length
    return replace(batch, response_lengths=changed)


def mini_batches_of(
    policy: "MegatronPolicy",
    batch: TrainBatch,
    old: Rows | None,
    *,
    responses_per_update: int,
    micro_batch_size: int,
) -> list[MiniBatch]:
    """This rank's mini-batches, with the given old statistics."""
    mini_batches = build_mini_batches(
        batch,
        responses_per_update=responses_per_update,
        limits=MicroBatchLimits(micro_batch_size, None, policy.length_multiple),
        attention_length=policy.attention_length,
        data_parallel_rank=policy.data_parallel_rank,
        data_parallel_size=policy.data_parallel_size,
        max_response_length=LONGEST_RESPONSE,
    )
    if old is None:
        return mini_batches
    return [
        replace(mini, micro_batches=[micro.with_old(_place(old, micro)) for micro in mini.micro_batches])
        for mini in mini_batches
    ]


def _place(rows: Rows, micro: MicroBatch) -> TokenStatistics:
    """Row values at the positions of a micro-batch's trained targets."""
    placed = torch.zeros(2, *micro.mask.shape)
    for index, row in enumerate(micro.rows.tolist()):
        own = micro.mask[index]
        for target, source in zip(placed, (rows.logprobs, rows.entropy), strict=True):
            target[index, own] = source[row, : int(own.sum())]
    return TokenStatistics(*placed)


def to_rows(mini_batches: Sequence[MiniBatch], statistics: Sequence[Sequence[TokenStatistics]]) -> Found:
    """What statistics say of this rank's responses: the way back of `_place`."""
    found: Found = {}
    for mini, of_mini in zip(mini_batches, statistics, strict=True):
        for micro, values in zip(mini.micro_batches, of_mini, strict=True):
            for index, row in enumerate(micro.rows.tolist()):
                if row >= 0:
                    found[row] = tuple(value[index, micro.mask[index]].cpu() for value in values)
    return found


def stack_rows(of_ranks: Sequence[Found], rows: int) -> Rows:
    """Put together what `to_rows` found on each rank; rows that none has stay 0."""
    stacked = torch.zeros(2, rows, LONGEST_RESPONSE)
    for found in of_ranks:
        for row, values in found.items():
            for target, value in zip(stacked, values, strict=True):
                target[row, : len(value)] = value
    return Rows(*stacked)
