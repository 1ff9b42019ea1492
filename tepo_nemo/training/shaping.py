"""Advantages of tokens: a rollout is put together from all ranks, shaped as a whole, and shared out again."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

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
        replace(mini, micro_batches=[with_advantages(micro, shaped) for micro in mini.micro_batches])
        for mini in mini_batches
    ]


def _whole_rollout(
    policy: Policy, mini_batches: Sequence[MiniBatch], batch: TrainBatch, rewards: Tensor
) -> RolloutTokens:
    micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
    assert all(micro.old is not None for micro in micro_batches), "shaping needs all old statistics"
    whole = partial(whole_by_response, policy, micro_batches, batch)
    with_reference = micro_batches[0].reference_logprobs is not None
    return RolloutTokens(
        old_logprobs=whole([micro.old.logprobs for micro in micro_batches]),
        old_entropy=whole([micro.old.entropy for micro in micro_batches]),
        advantages=batch.advantages,
        rewards=rewards,
        groups=batch.groups,
        mask=torch.arange(batch.response_tokens.shape[1]) < batch.response_lengths[:, None],
        reference_logprobs=whole([micro.reference_logprobs for micro in micro_batches])
        if with_reference
        else None,
    )


def whole_by_response(
    policy: Policy, micro_batches: Sequence[MicroBatch], batch: TrainBatch, values: Sequence[Tensor]
) -> Tensor:
    """What the micro-batches of all ranks have, [S, L] each, by response: [R, T] on every rank."""
    width = batch.response_tokens.shape[1]
    rows = policy.gather_rows(torch.cat([micro.rows for micro in micro_batches]))
    of_rows = policy.gather_rows(
        torch.cat(
            [
                micro.by_response(of_micro, width)
                for micro, of_micro in zip(micro_batches, values, strict=True)
            ]
        )
    )
    whole = of_rows.new_zeros(len(batch), width)
    whole[rows[rows >= 0]] = of_rows[rows >= 0]
    return whole


def with_advantages(micro: MicroBatch, advantages: Tensor) -> MicroBatch:
    """Replace the advantages by those of tokens, [R, T] of all responses."""
    return replace(micro, advantages=micro.of_responses(advantages).to(micro.advantages.dtype))
