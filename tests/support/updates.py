"""What the ranks of a layout make of a rollout: losses, gradients, updates. Asked for in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from support.gather import Part, own_gradients, own_weights
from support.synthetic import RESPONSES_PER_UPDATE, Found, Rows, mini_batches_of, stack_rows, to_rows
from support.toy import build_objective, build_policy

from tepo_nemo.config.schema import AlgorithmConfig, Config
from tepo_nemo.training.batch import MiniBatch, TrainBatch

if TYPE_CHECKING:  # the ranks alone have the stack
    from tepo_nemo.nemo.build import Host
    from tepo_nemo.nemo.policy import MegatronPolicy


class Start(NamedTuple):
    """A saved model, and what it makes of a rollout."""

    weights: Part
    rows: Rows


def make_start(rank: int, world_size: int, config: Config, path: Path, batch: TrainBatch) -> Start:
    """Save a model with random weights; run in one rank. Its norm weights are not 1: each has a say."""
    host, policy = build_policy(config)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in host.actor.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    policy.save(path)
    found = statistics_of(policy, batch, micro_batch_size=len(batch))
    return Start(own_weights(host), stack_rows([found], len(batch)))


def statistics_of(policy: "MegatronPolicy", batch: TrainBatch, *, micro_batch_size: int) -> Found:
    """Statistics of this rank's responses, the batch taken as one mini-batch."""
    mini_batches = mini_batches_of(
        policy, batch, None, responses_per_update=len(batch), micro_batch_size=micro_batch_size
    )
    return to_rows(mini_batches, policy.get_token_statistics(mini_batches))


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
    """An update on each mini-batch of a rollout."""

    batch: TrainBatch
    old: Rows | None
    micro_batch_size: int = 4


@dataclass(frozen=True)
class Job:
    """Losses and updates of one host."""

    config: Config
    cases: Mapping[str, Case]
    updates: Updates | None = None


class Taken(NamedTuple):
    """A loss with its metrics (after `reduce_metrics`), this rank's gradients, what the first layer saw."""

    metrics: dict[str, float]
    gradients: Part
    layer_lengths: list[int]  # sequence length of each of its forward passes


@dataclass
class Report:
    """One rank's answer to a job."""

    cases: dict[str, Taken] = field(default_factory=dict)
    before: Part | None = None
    after: Part | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)  # an entry an update
    grad_norms: list[float] = field(default_factory=list)
    statistics: list[Found] = field(default_factory=list)  # just before each update, of its responses


def perform(rank: int, world_size: int, jobs: Sequence[Job]) -> list[Report]:
    """Run in all ranks of a layout. Each job has a host of its own."""
    reports = []
    for job in jobs:
        host, policy = build_policy(job.config)
        policy.prepare_for_training()
        report = Report({name: take_case(host, policy, case) for name, case in job.cases.items()})
        if job.updates is not None:
            _update(host, policy, job, report)
        reports.append(report)
    return reports


def take_case(host: "Host", policy: "MegatronPolicy", case: Case) -> Taken:
    """Forward and backward, as the trainer does it."""
    mini_batch = _mini_batches(policy, case, case.responses_per_update, case.algorithm)[0]
    lengths: list[int] = []
    layer = host.actor.get_model_module_list()[0].decoder.layers[0]
    hook = layer.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(
            len(kwargs.get("hidden_states", args[0] if args else None))
        ),
        with_kwargs=True,
    )
    metrics = _take(host, policy, mini_batch, case.algorithm)
    hook.remove()
    return Taken(metrics, own_gradients(host), lengths)


def _mini_batches(
    policy: "MegatronPolicy", asked: Case | Updates, responses_per_update: int, algorithm: AlgorithmConfig
) -> list[MiniBatch]:
    """With all that the trainer attaches once a rollout; the reference policy is the weights of now."""
    from tepo_nemo.training.shaping import with_shaped_advantages
    from tepo_nemo.training.statistics import with_old_statistics, with_reference_logprobs

    objective = build_objective(algorithm)
    mini_batches = mini_batches_of(
        policy,
        asked.batch,
        asked.old,
        responses_per_update=responses_per_update,
        micro_batch_size=asked.micro_batch_size,
    )
    if asked.old is None:
        mini_batches = with_old_statistics(policy, mini_batches, first_too=objective.shapes_advantages)
    if objective.needs_reference:
        policy.keep_reference()
        mini_batches = with_reference_logprobs(policy, mini_batches)
    if objective.shapes_advantages:
        rewards = (asked.batch.advantages > 0).double()
        mini_batches = with_shaped_advantages(policy, objective, mini_batches, asked.batch, rewards)
    return mini_batches


def _take(
    host: "Host", policy: "MegatronPolicy", mini_batch: MiniBatch, algorithm: AlgorithmConfig
) -> dict[str, float]:
    from tepo_nemo.objectives.contract import Mean
    from tepo_nemo.training.statistics import with_minibatch_statistics

    host.actor.objective = build_objective(algorithm)
    if host.actor.objective.needs_minibatch_statistics:
        mini_batch = with_minibatch_statistics(policy, host.actor.objective, mini_batch, seed=5)
    policy.prepare_for_training_step()
    loss, metrics = policy.get_loss_and_metrics(mini_batch, forward_only=False)
    policy.finish_training_step()
    if loss is not None:
        metrics["loss"] = Mean(loss, loss.new_full((), 1 / policy.data_parallel_size))
    return policy.reduce_metrics(metrics)


def _update(host: "Host", policy: "MegatronPolicy", job: Job, report: Report) -> None:
    report.before = own_weights(host)
    algorithm = job.config.algorithm
    for mini_batch in _mini_batches(policy, job.updates, RESPONSES_PER_UPDATE, algorithm):
        report.statistics.append(to_rows([mini_batch], policy.get_token_statistics([mini_batch])))
        report.metrics.append(_take(host, policy, mini_batch, algorithm))
        gradient = policy.clip_gradient(None, {})
        assert not gradient.not_finite
        policy.optimizer_step(job.config.trainer.optimizer.learning_rate)
        report.grad_norms.append(gradient.norm)
    report.after = own_weights(host)
