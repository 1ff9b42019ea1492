"""The training loop: rollout -> group statistics -> old statistics -> updates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tepo_nemo.objectives.advantage import group_advantages, overlong_penalty
from tepo_nemo.objectives.contract import Mean, Objective
from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.rollout.sampling import stream_seed
from tepo_nemo.runs.stop import Stopped
from tepo_nemo.training.balance import MicroBatchLimits
from tepo_nemo.training.batch import MiniBatch, TrainBatch, add_means
from tepo_nemo.training.collect import StepCollector, trained_lengths, whole_mini_batches
from tepo_nemo.training.metrics import UPDATE_METRICS, padding_mean, rollout_metrics
from tepo_nemo.training.minibatch import build_mini_batches
from tepo_nemo.training.policy import Policy, UpdateResult
from tepo_nemo.training.progress import (
    SavedProgress,
    StepProgress,
    dump_progress,
    load_progress,
    with_saved_statistics,
)
from tepo_nemo.training.protocols import Recorder, Saver
from tepo_nemo.training.rollout_check import RefitProbe, RolloutCheck
from tepo_nemo.training.shaping import with_shaped_advantages
from tepo_nemo.training.statistics import (
    with_minibatch_statistics,
    with_old_statistics,
    with_reference_logprobs,
)
from tepo_nemo.training.timers import PhaseTimers


@dataclass(frozen=True)
class TrainerSettings:
    """The numbers of a run; responses are counted over all ranks."""

    seed: int
    max_steps: int
    prompts_per_step: int
    responses_per_prompt: int
    updates_per_rollout: int
    micro_batch_size: int | None
    micro_batch_tokens: int | None
    sequence_packing: bool
    max_response_length: int
    advantage: str
    overlong_fraction: float
    learning_rate: float
    warmup_steps: int
    save_interval: int
    eval_interval: int

    @property
    def responses_per_update(self) -> int:
        return self.prompts_per_step * self.responses_per_prompt // self.updates_per_rollout


class Trainer:
    """Trains a policy with an objective, with NeMo-Aligner's life cycle (`fit`, `save`, `state_dict`).

    `step` steps are finished. A step that is stopped between two of its updates is kept as `_progress`.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        policy: Policy,
        objective: Objective,
        collector: StepCollector,
        timers: PhaseTimers,
        recorder: Recorder,
        rollout_check: RolloutCheck,
        refit_probe: RefitProbe,
        evaluate: Callable[[], dict[str, float]],
        saver: Saver,
        check_stop: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._objective = objective
        self._collector = collector
        self._timers = timers
        self._recorder = recorder
        self._rollout_check = rollout_check
        self._refit_probe = refit_probe
        self._evaluate = evaluate
        self._saver = saver
        self._check_stop = check_stop
        self.step = 0
        self.consumed_prompts = 0
        self._progress: StepProgress | None = None
        self._batch: TrainBatch | None = None
        self._mini_batches: list[MiniBatch] = []
        self._last_metrics: dict[str, float] = {}

    # ----------------------------------------------------------------- life cycle

    def fit(self) -> None:
        """Train from the current step to `max_steps`. Raises Stopped, with the state saved."""
        try:
            while self.step < self._settings.max_steps:
                self._fit_step()
        except Stopped:
            if self._progress is not None or (self.step and not self._saver.has(self.step)):
                self._recorder.flush()
                self.save(required=True)
            raise

    def _fit_step(self) -> None:
        settings, number = self._settings, self.step + 1
        last = number == settings.max_steps
        self._timers.take()  # evaluating and saving are no part of a step
        metrics, kept, advantages = self._train_step()
        if settings.eval_interval and number % settings.eval_interval == 0 and not last:
            metrics |= self._evaluate()
        # Recorded before it is saved: a run that resumes from a checkpoint finds its steps recorded.
        self._recorder.step(number, metrics, kept, advantages)
        self.step, self.consumed_prompts = number, int(metrics["consumed_prompts"])
        self._progress, self._last_metrics = None, metrics
        self._saver.poll()
        if last or (settings.save_interval and number % settings.save_interval == 0):
            self._recorder.flush()
            self.save(required=last)

    def save(self, *, required: bool) -> None:
        """Save the state of now. `required`: the run ends after it, so that a failure is the run's."""
        progress = self._progress
        if progress is not None and progress.done < len(self._mini_batches):
            progress.seconds = self._timers.take()
        self._saver.save(
            self.state_dict(),
            None
            if progress is None
            else dump_progress(self._policy, progress, self._batch, self._mini_batches[progress.done :]),
            self._last_metrics,
            required=required,
        )

    def state_dict(self) -> dict[str, int]:
        """The trainer's own state; everything random is a function of it and the seed."""
        return {"step": self.step, "consumed_prompts": self.consumed_prompts}

    def load_state_dict(self, state: dict[str, Any], progress: SavedProgress | None = None) -> None:
        """Continue after the step that `state` was taken at, or inside the one after it."""
        self.step = state["step"]
        self.consumed_prompts = state["consumed_prompts"]
        if progress is not None:
            self._progress = load_progress(progress)
            self._batch = self._train_batch(self._progress.kept, self._progress.advantages)
            self._mini_batches = with_saved_statistics(
                self._cut(self._batch), self._progress.done, progress.by_response
            )

    # ----------------------------------------------------------------- a step

    def _train_step(self) -> tuple[dict[str, float], ScoredBatch | None, Tensor | None]:
        if self._progress is None:
            metrics, kept = self._collect()
            if kept is None:
                metrics |= {"update/skipped": self._settings.updates_per_rollout, "tokens/trained": 0}
                return metrics | self._timers.take(), None, None
            progress = self._begin(metrics, kept)
        else:
            progress = self._progress
            self._timers.give(progress.seconds)
            self._policy.prepare_for_training()
        self._update(progress)
        metrics = progress.metrics | self._update_metrics(progress)
        progress.seconds = self._timers.take()
        return metrics | progress.seconds, progress.kept, progress.advantages

    def _collect(self) -> tuple[dict[str, float], ScoredBatch | None]:
        """Metrics of the rollout, and the groups to train on."""
        policy, settings = self._policy, self._settings
        policy.prepare_for_inference()
        self._refit_probe.look(policy)
        collected = self._collector.collect(self.step, self.consumed_prompts)
        policy.finish_inference()
        metrics = {
            "step": self.step + 1,
            "consumed_prompts": collected.consumed_prompts,
            "lr": self._learning_rate(),
            "checkpoint/failed_saves": self._saver.failed,
        }
        metrics |= dict.fromkeys(UPDATE_METRICS, float("nan")) | rollout_metrics(collected)
        if collected.kept is None:
            return metrics, None
        groups = settings.prompts_per_step // settings.updates_per_rollout
        return metrics, whole_mini_batches(collected.kept, groups)

    def _begin(self, metrics: dict[str, float], kept: ScoredBatch) -> StepProgress:
        """All that the updates need, from the weights that made the rollout."""
        advantages = self._advantages(kept)
        self._batch = self._train_batch(kept, advantages)
        mini_batches = self._cut(self._batch)
        self._policy.prepare_for_training()
        check = self._rollout_check.due(self.step)
        # The first of several mini-batches is left without: the others are enough to compare.
        all_old = check and len(mini_batches) == 1
        self._mini_batches = self._measure(mini_batches, self._batch, kept.rewards, all_old=all_old)
        if check:
            self._rollout_check.compare(self._policy, self.step, self._mini_batches, kept.rollouts)
        return StepProgress(metrics, kept, advantages, padding_mean(mini_batches))

    def _advantages(self, kept: ScoredBatch) -> Tensor:
        settings = self._settings
        penalty = overlong_penalty(
            kept.rollouts.generation.lengths, settings.max_response_length, settings.overlong_fraction
        )
        return group_advantages(kept.rewards + penalty, kept.rollouts.groups, kept.valid, settings.advantage)

    def _train_batch(self, kept: ScoredBatch, advantages: Tensor) -> TrainBatch:
        return TrainBatch(
            prompt_tokens=[kept.rollouts.prompts[group].tokens for group in kept.rollouts.groups.tolist()],
            response_tokens=kept.rollouts.generation.tokens,
            response_lengths=trained_lengths(kept),
            groups=kept.rollouts.groups,
            advantages=advantages,
            sampled_logprobs=kept.rollouts.generation.logprobs,
        )

    def _cut(self, batch: TrainBatch) -> list[MiniBatch]:
        settings, policy = self._settings, self._policy
        return build_mini_batches(
            batch,
            responses_per_update=settings.responses_per_update,
            limits=MicroBatchLimits(
                settings.micro_batch_size,
                settings.micro_batch_tokens,
                policy.length_multiple,
                packed=settings.sequence_packing,
            ),
            attention_length=policy.attention_length,
            data_parallel_rank=policy.data_parallel_rank,
            data_parallel_size=policy.data_parallel_size,
            max_response_length=settings.max_response_length,
        )

    def _update(self, progress: StepProgress) -> None:
        """The updates that are left of a step."""
        for mini_batch in self._mini_batches[progress.done :]:
            self._check_stop()
            loss, means, result = self._take_update(mini_batch)
            progress.done += 1
            self._progress = progress  # from here on the weights are no longer those of the last step
            if result.skipped:  # its loss is not finite, and would hide those of the other updates
                continue
            progress.grad_norms.append(result.grad_norm)
            progress.trained_tokens += mini_batch.totals.tokens
            add_means(progress.means, means)
            if loss is not None:
                share = torch.full_like(loss, 1.0 / self._policy.data_parallel_size)
                add_means(progress.means, {"loss": Mean(loss, share)})
        self._policy.finish_training()

    def _take_update(self, mini_batch: MiniBatch) -> tuple[Tensor | None, dict[str, Mean], UpdateResult]:
        """One optimizer update: this rank's shares of the loss and of the metrics, and what became of it."""
        policy = self._policy
        if self._objective.needs_minibatch_statistics:
            with self._timers.phase("old_stats"):
                seed = stream_seed(self._settings.seed, "selection", self.step)
                mini_batch = with_minibatch_statistics(policy, self._objective, mini_batch, seed)
        with self._timers.phase("train"):
            policy.prepare_for_training_step()
            loss, means = policy.get_loss_and_metrics(mini_batch, forward_only=False)
            policy.finish_training_step()
            result = policy.optimizer_step(self._learning_rate())
        return loss, means, result

    def _update_metrics(self, progress: StepProgress) -> dict[str, float]:
        norms = progress.grad_norms
        return self._policy.reduce_metrics(progress.means) | {
            "grad_norm": sum(norms) / len(norms) if norms else float("nan"),
            "update/skipped": self._settings.updates_per_rollout - len(norms),
            "tokens/trained": progress.trained_tokens,
        }

    def _measure(
        self, mini_batches: list[MiniBatch], batch: TrainBatch, rewards: Tensor, *, all_old: bool
    ) -> list[MiniBatch]:
        """What the updates need of the weights that made the rollout and of the reference, once a rollout.

        Args:
            all_old: something looks at the old statistics before the first update.
        """
        policy, objective = self._policy, self._objective
        first_too = all_old or objective.shapes_advantages
        with self._timers.phase("old_stats"):
            mini_batches = with_old_statistics(policy, mini_batches, first_too=first_too)
        if objective.needs_reference:
            with self._timers.phase("reference"):
                mini_batches = with_reference_logprobs(policy, mini_batches)
        if objective.shapes_advantages:
            with self._timers.phase("old_stats"):
                mini_batches = with_shaped_advantages(policy, objective, mini_batches, batch, rewards)
        return mini_batches

    def _learning_rate(self) -> float:
        warmup = self._settings.warmup_steps
        return self._settings.learning_rate * min(1.0, (self.step + 1) / (warmup + 1))
