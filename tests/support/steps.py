"""Single optimizer steps, looked at closely. Run in all ranks of a layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from support.gather import Part, own_gradients, own_weights
from support.synthetic import RESPONSES_PER_UPDATE, Rows, mini_batches_of
from support.toy import build_policy

from tepo_nemo.config.schema import Config
from tepo_nemo.training.batch import MiniBatch, TrainBatch

if TYPE_CHECKING:  # the ranks alone have the stack
    from tepo_nemo.nemo.policy import MegatronPolicy
    from tepo_nemo.training.policy import Gradient


@dataclass(frozen=True)
class Step:
    """One update."""

    before: Part
    gradients: Part
    after: Part
    gradient: "Gradient"


@dataclass(frozen=True)
class Recovery:
    """An update whose gradient is not finite, the clean one after it, and the same clean one without it."""

    poisoned: Step
    clean: Step
    undisturbed: Step


def take_steps(
    rank: int, world_size: int, configs: Sequence[Config], batch: TrainBatch, old: Rows, learning_rate: float
) -> list[Step]:
    """One step of each configuration, at a learning rate that need not be the configured one."""
    steps = []
    for config in configs:
        host, policy = build_policy(config)
        steps.append(take_step(host, policy, first_mini_batch(policy, batch, old), learning_rate))
    return steps


def recover(
    rank: int, world_size: int, configs: Sequence[Config], batch: TrainBatch, old: Rows, poison: float
) -> list[Recovery]:
    """Put `poison` into one advantage of the last micro-batch of the last data-parallel rank, and go on."""
    recoveries = []
    for config in configs:
        learning_rate = config.trainer.optimizer.learning_rate
        host, policy = build_policy(config)
        clean = first_mini_batch(policy, batch, old)
        poisoned = clean
        if policy.data_parallel_rank == policy.data_parallel_size - 1:
            *others, last = clean.micro_batches
            advantages = last.advantages.clone()
            advantages[tuple(last.mask.nonzero()[0])] = poison
            poisoned = replace(clean, micro_batches=[*others, replace(last, advantages=advantages)])
        first = take_step(host, policy, poisoned, learning_rate)
        second = take_step(host, policy, clean, learning_rate)
        fresh_host, fresh_policy = build_policy(config)
        recoveries.append(Recovery(first, second, take_step(fresh_host, fresh_policy, clean, learning_rate)))
    return recoveries


def first_mini_batch(policy: "MegatronPolicy", batch: TrainBatch, old: Rows) -> MiniBatch:
    """With old statistics, in micro-batches of 4."""
    return mini_batches_of(policy, batch, old, responses_per_update=RESPONSES_PER_UPDATE, micro_batch_size=4)[
        0
    ]


def take_step(host, policy: "MegatronPolicy", mini_batch: MiniBatch, learning_rate: float) -> Step:
    """An update as the trainer makes it."""
    before = own_weights(host)
    policy.prepare_for_training()
    policy.prepare_for_training_step()
    loss, metrics = policy.get_loss_and_metrics(mini_batch, forward_only=False)
    policy.finish_training_step()
    gradients = own_gradients(host)
    gradient = policy.clip_gradient(loss, metrics)
    if not gradient.not_finite:
        policy.optimizer_step(learning_rate)
    return Step(before, gradients, own_weights(host), gradient)


def same_weights(a: Part, b: Part) -> bool:
    """To the bit."""
    return all(torch.equal(shard.value, b.shards[name].value) for name, shard in a.shards.items())
