"""What the ranks of a layout make of a rollout: losses, gradients, updates. Asked and answered in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from support.gather import Part, own_gradients, own_weights
from support.synthetic import RESPONSES_PER_UPDATE, Rows, mini_batches_of, stack_rows, to_rows
from support.toy import build_objective, build_policy

from tepo_nemo.config.schema import AlgorithmConfig, Config
from tepo_nemo.training.batch import TrainBatch


class Start(NamedTuple):
    """A saved model, and what it makes of a rollout."""

    path: Path
    weights: Part
    rows: Rows


def make_start(rank: int, world_size: int, config: Config, path: Path, batch: TrainBatch) -> Start:
    """Save a randomly initialised model; run in one rank. Its norm weights are not 1, so that each has a say."""
    host, policy = build_policy(config)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in host.actor.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    policy.save(path)
    mini_batches = mini_batches_of(
        policy, batch, None, responses_per_update=len(batch), micro_batch_size=len(batch)
    )
    rows = to_rows(mini_batches, policy.get_token_statistics(mini_batches))
    return Start(path, own_weights(host), stack_rows([rows], len(batch)))


@dataclass(frozen=True)
class Case:
    """A loss to take at the starting weights, over the first mini-batch."""

    batch: TrainBatch
    old: Rows | None  # None: measured under the weights of the moment, as the trainer does
    algorithm: AlgorithmConfig
    micro_batch_size: int = 4
    responses_per_update: int = RESPONSES_PER_UPDATE


@dataclass(frozen=True)
class Updates:
    """Three updates on the three mini-batches of a rollout."""

    batch: TrainBatch
    old: Rows
    micro_batch_size: int = 4


@dataclass(frozen=True)
class Job:
    """Losses and updates of one host."""

    config: Config
    cases: Mapping[str, Case]
    updates: Updates | None


@dataclass(frozen=True)
class Taken:
    """A loss with its metrics (after `reduce_metrics`) and this rank's gradients."""

    metrics: dict[str, float]
    gradients: Part


@dataclass
class Report:
    """One rank's answer to a job."""

    cases: dict[str, Taken] = field(default_factory=dict)
    before: Part | None = None
    after: Part | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)  # an entry an update
    grad_norms: list[float] = field(default_factory=list)
    statistics: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=list
    )  # just before each update


def perform(rank: int, world_size: int, jobs: Sequence[Job]) -> list[Report]:
    """Run in ranks. Jobs are of one layout; each has a host of its own."""
    return [_perform(job) for job in jobs]


def _perform(job: Job) -> Report:
    from tepo_nemo.objectives.contract import Mean
    from tepo_nemo.training.statistics import with_minibatch_statistics, with_old_statistics

    host, policy = build_policy(job.config)
    report = Report()

    def take(mini_batch, objective) -> dict[str, float]:
        host.actor.objective = objective
        if objective.needs_minibatch_statistics:
            mini_batch = with_minibatch_statistics(policy, mini_batch)
        policy.prepare_for_training_step()
        loss, metrics = policy.get_loss_and_metrics(mini_batch, forward_only=False)
        policy.finish_training_step()
        if loss is not None:
            metrics["loss"] = Mean(loss, loss.new_full((), 1 / policy.data_parallel_size))
        return policy.reduce_metrics(metrics)

    policy.prepare_for_training()
    for name, case in job.cases.items():
        mini_batches = mini_batches_of(
            policy,
            case.batch,
            case.old,
            responses_per_update=case.responses_per_update,
            micro_batch_size=case.micro_batch_size,
        )
        if case.old is None:
            mini_batches = with_old_statistics(policy, mini_batches)
        metrics = take(mini_batches[0], build_objective(case.algorithm))
        report.cases[name] = Taken(metrics, own_gradients(host))
    if job.updates is not None:
        report.before = own_weights(host)
        mini_batches = mini_batches_of(
            policy,
            job.updates.batch,
            job.updates.old,
            responses_per_update=RESPONSES_PER_UPDATE,
            micro_batch_size=job.updates.micro_batch_size,
        )
        for mini_batch in mini_batches:
            report.statistics.append(to_rows([mini_batch], policy.get_token_statistics([mini_batch])))
            report.metrics.append(take(mini_batch, build_objective(job.config.algorithm)))
            result = policy.optimizer_step(job.config.trainer.optimizer.learning_rate)
            assert not result.skipped
            report.grad_norms.append(result.grad_norm)
        report.after = own_weights(host)
    return report
