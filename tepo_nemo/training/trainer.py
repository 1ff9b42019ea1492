"""The training loop: rollout -> group statistics -> old statistics -> updates."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import Mean, Objective
from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.rollout.sampling import stream_seed
from tepo_nemo.runs.stop import Stopped
from tepo_nemo.training.batch import MiniBatch, TrainBatch, add_means
from tepo_nemo.training.collect import CollectedStep, Collector, whole_mini_batches
from tepo_nemo.training.guard import Rewind, Skip, UpdateGuard
from tepo_nemo.training.metrics import UPDATE_METRICS, padding_mean, rollout_metrics, skipped_updates
from tepo_nemo.training.policy import Gradient, Policy
from tepo_nemo.training.preparation import Preparation
from tepo_nemo.training.progress import (
    SavedProgress,
    StepProgress,
    dump_progress,
    load_progress,
    with_saved_statistics,
)
from tepo_nemo.training.protocols import Recorder, Saver
from tepo_nemo.training.rollout_check import RefitProbe, RolloutCheck
from tepo_nemo.training.settings import TrainerSettings
from tepo_nemo.training.statistics import with_minibatch_statistics
from tepo_nemo.training.timers import PhaseTimers


class Trainer:
    """Trains a policy with an objective, with NeMo-Aligner's life cycle (`fit`, `save`, `state_dict`).

    `step` steps are finished. A step that is stopped between two of its updates is kept as `_progress`.

    Args:
        evaluate: scores of the weights of now, as metrics.
        refit_probe: None where rollouts come from the training weights themselves.
        check_stop: raises Stopped on all ranks where one is to stop.
        go_back: puts the newest checkpoint of a whole step in place, on all ranks, and returns the state that
            the trainer had; None where there is none.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        policy: Policy,
        objective: Objective,
        collector: Collector,
        timers: PhaseTimers,
        recorder: Recorder,
        rollout_check: RolloutCheck,
        refit_probe: RefitProbe | None,
        evaluate: Callable[[], dict[str, float]],
        saver: Saver,
        check_stop: Callable[[], None],
        go_back: Callable[[], dict[str, Any] | None],
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
        self._go_back = go_back
        self._prepare = Preparation(settings, policy, objective, timers)
        self._guard = UpdateGuard(
            max_bad_updates=settings.max_bad_updates,
            spike_factor=settings.spike_factor,
            spike_window=settings.spike_window,
        )
        self.step = 0
        self.consumed_prompts = 0
        self._progress: StepProgress | None = None
        self._collected: CollectedStep | None = None
        self._batch: TrainBatch | None = None
        self._mini_batches: list[MiniBatch] = []
        self._last_metrics: dict[str, float] = {}

    # ----------------------------------------------------------------- life cycle

    def fit(self) -> None:
        """Train from the current step to `max_steps`.

        Raises:
            Stopped: a rank was asked to stop; the state is saved.
            BadUpdatesError: too many updates in a row were skipped. Nothing is saved: to go on from here
                would be to skip them again, and the checkpoints that there are stay.
        """
        try:
            while self.step < self._settings.max_steps:
                try:
                    self._fit_step()
                except Rewind as rewind:
                    self._go_on_from(rewind.state)
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

    def _go_on_from(self, state: dict[str, Any]) -> None:
        """Take the steps after an earlier one again, with the prompts that follow those of now."""
        consumed, rewinds, limit = (
            self.consumed_prompts,
            self._guard.rewinds + 1,
            self._settings.spike_rewinds,
        )
        self._policy.finish_training()
        self._progress, self._last_metrics = None, {}
        self.load_state_dict(state)
        self.consumed_prompts, self._guard.rewinds = consumed, rewinds
        self._recorder.go_back(self.step)
        self._recorder.message(f"back to step {self.step}, with other prompts (rewind {rewinds} of {limit})")
        self.save(required=False)  # who goes on from there must not meet the same prompts

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

    def state_dict(self) -> dict[str, Any]:
        """The trainer's own state; everything random is a function of it and the seed."""
        return {
            "step": self.step,
            "consumed_prompts": self.consumed_prompts,
            "guard": self._guard.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], progress: SavedProgress | None = None) -> None:
        """Continue after the step that `state` was taken at, or inside the one after it."""
        self.step = state["step"]
        self.consumed_prompts = state["consumed_prompts"]
        self._guard.load_state_dict(state["guard"])
        if progress is not None:
            self._progress = load_progress(progress)
            kept = self._progress.kept  # what else was generated is forgotten
            consumed = int(self._progress.metrics["consumed_prompts"])
            self._collected = CollectedStep(kept, kept, range(len(kept.rollouts.prompts)), consumed)
            self._batch = self._prepare.train_batch(self._progress.kept, self._progress.advantages)
            self._mini_batches = with_saved_statistics(
                self._prepare.cut(self._batch), self._progress.done, progress.by_response
            )

    # ----------------------------------------------------------------- a step

    def _train_step(self) -> tuple[dict[str, float], ScoredBatch | None, Tensor | None]:
        if self._progress is None:
            metrics, kept = self._collect()
            if kept is None:
                metrics |= skipped_updates(self._settings.updates_per_rollout) | {"tokens/trained": 0}
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
        if self._collector.generates:
            policy.prepare_for_inference()
            if self._refit_probe is not None:
                self._refit_probe.look(policy)
        collected = self._collector.collect(self.step, self.consumed_prompts)
        if self._collector.generates:
            policy.finish_inference()
        self._collected = collected
        self._recorder.rollout(self.step + 1, collected)
        metrics = {
            "step": self.step + 1,
            "consumed_prompts": collected.consumed_prompts,
            "lr": self._learning_rate(),
            "checkpoint/failed_saves": self._saver.failed,
            "update/rewinds": self._guard.rewinds,
        }
        metrics |= dict.fromkeys(UPDATE_METRICS, float("nan")) | rollout_metrics(collected)
        if collected.kept is None:
            return metrics, None
        groups = settings.prompts_per_step // settings.updates_per_rollout
        return metrics, whole_mini_batches(collected.kept, groups)

    def _begin(self, metrics: dict[str, float], kept: ScoredBatch) -> StepProgress:
        """All that the updates need, from the weights that made the rollout."""
        advantages = self._prepare.advantages(kept)
        self._batch = self._prepare.train_batch(kept, advantages)
        mini_batches = self._prepare.cut(self._batch)
        self._policy.prepare_for_training()
        check = self._rollout_check.due(self.step)
        # The first of several mini-batches is left without: the others are enough to compare. A single one
        # takes a pass for it, but not to compare the policy with itself.
        all_old = check and len(mini_batches) == 1 and self._refit_probe is not None
        self._mini_batches = self._prepare.measure(mini_batches, self._batch, kept.rewards, all_old=all_old)
        if check:
            self._rollout_check.compare(self._policy, self.step, self._mini_batches, kept.rollouts)
        return StepProgress(metrics, kept, advantages, padding_mean(mini_batches))

    def _update(self, progress: StepProgress) -> None:
        """The updates that are left of a step."""
        for mini_batch in self._mini_batches[progress.done :]:
            self._check_stop()
            loss, means, gradient, skip = self._take_update(mini_batch)
            progress.done += 1
            self._progress = progress  # from here on the weights are no longer those of the last step
            if skip is not None:  # what it measured would hide what the others have
                self._skip(progress, skip)
                continue
            progress.grad_norms.append(gradient.norm)
            progress.trained_tokens += mini_batch.totals.tokens
            add_means(progress.means, means)
            if loss is not None:
                share = torch.full_like(loss, 1.0 / self._policy.data_parallel_size)
                add_means(progress.means, {"loss": Mean(loss, share)})
        self._policy.finish_training()

    def _take_update(
        self, mini_batch: MiniBatch
    ) -> tuple[Tensor | None, dict[str, Mean], Gradient, Skip | None]:
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
            gradient = policy.clip_gradient(loss, means)
            skip = self._guard.judge(gradient)
            if skip is None:
                policy.optimizer_step(self._learning_rate())
        return loss, means, gradient, skip

    def _skip(self, progress: StepProgress, skip: Skip) -> None:
        """Count an update that was not made, and end the run where it is one too many."""
        if skip.reason == "spike":
            progress.spikes += 1
        else:
            progress.not_finite += 1
        self._recorder.bad_update(self.step + 1, progress.done, skip.text, self._collected)
        if skip.reason == "spike" and self._guard.rewinds < self._settings.spike_rewinds:
            state = self._go_back()
            if state is not None:
                self.consumed_prompts = self._collected.consumed_prompts
                raise Rewind(state)
        self._guard.check_end(self.step + 1, progress.done, skip)

    def _update_metrics(self, progress: StepProgress) -> dict[str, float]:
        norms = progress.grad_norms
        return self._policy.reduce_metrics(progress.means) | {
            "grad_norm": sum(norms) / len(norms) if norms else float("nan"),
            "tokens/trained": progress.trained_tokens,
            **skipped_updates(
                self._settings.updates_per_rollout - len(norms), progress.not_finite, progress.spikes
            ),
        }

    def _learning_rate(self) -> float:
        warmup = self._settings.warmup_steps
        return self._settings.learning_rate * min(1.0, (self.step + 1) / (warmup + 1))
