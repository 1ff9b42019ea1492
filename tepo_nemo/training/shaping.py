"""Advantages of tokens: a rollout is put together from all ranks, shaped as a whole, and shared out again."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import Objective
from tepo_nemo.objectives.rollout import RolloutTokens
from tepo_nemo.training.batch import MicroBatch, MiniBatch, TrainBatch
from tepo_nemo.training.policy import Policy


def with_shaped_advantages(
    policy: Policy,
    objective: Objective,
    mini_batches: Sequence[MiniBatch],
    batch: TrainBatch,
    rewards: Tensor,
) -> list[MiniBatch]:
    """Replace each response's one advantage by what the objective makes of it, token by token.

    Every rank shapes the whole rollout, so that nothing depends on how it is shared out.

    Args:
        mini_batches: with the old statistics of all, and reference log-probs where the objective needs them.
        rewards: [R], as they were graded.
    """
    shaped = objective.shape_advantages(_whole_rollout(policy, mini_batches, batch, rewards))
    assert shaped.shape == batch.response_tokens.shape, (shaped.shape, batch.response_tokens.shape)
    return [
        replace(mini, micro_batches=[_with_advantages(micro, shaped) for micro in mini.micro_batches])
        for mini in mini_batches
    ]


def _whole_rollout(
    policy: Policy, mini_batches: Sequence[MiniBatch], batch: TrainBatch, rewards: Tensor
) -> RolloutTokens:
    micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
    width = batch.response_tokens.shape[1]
    rows = policy.gather_rows(torch.cat([micro.rows for micro in micro_batches]))
    values = policy.gather_rows(torch.cat([_by_response(micro, width) for micro in micro_batches]))
    whole = values.new_zeros(len(batch), *values.shape[1:])
    whole[rows[rows >= 0]] = values[rows >= 0]
    old_logprobs, old_entropy, *reference = whole.unbind(1)
    return RolloutTokens(
        old_logprobs=old_logprobs,
        old_entropy=old_entropy,
        advantages=batch.advantages,
        rewards=rewards,
        groups=batch.groups,
        mask=torch.arange(width) < batch.response_lengths[:, None],
        reference_logprobs=reference[0] if reference else None,
    )


def _trained_places(micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Of each trained token, [n] each: row and position in the micro-batch, column in the response."""
    row, position = micro.mask.nonzero(as_tuple=True)
    return row, position, micro.mask.cumsum(1)[row, position] - 1


def _by_response(micro: MicroBatch, width: int) -> Tensor:
    """Old log-prob, old entropy and, where there is one, reference log-prob, [S, 2 or 3, T], on the host."""
    assert micro.old is not None, "shaping needs the old statistics of every mini-batch"
    quantities = [*micro.old, *([] if micro.reference_logprobs is None else [micro.reference_logprobs])]
    values = torch.stack(quantities, dim=1).cpu()
    row, position, column = _trained_places(micro)
    responses = values.new_zeros(*values.shape[:2], width)
    responses[row, :, column] = values[row, :, position]
    return responses


def _with_advantages(micro: MicroBatch, shaped: Tensor) -> MicroBatch:
    row, position, column = _trained_places(micro)
    advantages = torch.zeros_like(micro.advantages)
    advantages[row, position] = shaped[micro.rows[row], column].to(advantages.dtype)
    return replace(micro, advantages=advantages)
