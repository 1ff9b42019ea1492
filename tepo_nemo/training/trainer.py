"""The training loop: rollout -> group statistics -> old statistics -> updates."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tepo_nemo.objectives.advantage import group_advantages, overlong_penalty
from tepo_nemo.objectives.contract import Mean, Objective
from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.rollout.sampling import stream_seed
from tepo_nemo.training.balance import MicroBatchLimits
from tepo_nemo.training.batch import MiniBatch, TrainBatch, add_means
from tepo_nemo.training.collect import StepCollector, trained_lengths, whole_mini_batches
from tepo_nemo.training.metrics import UPDATE_METRICS, padding_mean, rollout_metrics
from tepo_nemo.training.minibatch import build_mini_batches
from tepo_nemo.training.policy import Policy
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


class Recorder(Protocol):
    """Where a run is written down; ranks that write nothing have one that does nothing."""

    def step(
        self, step: int, metrics: dict[str, float], kept: ScoredBatch | None, advantages: Tensor | None
    ) -> None:
        """Metrics of a step and the responses that it trained on."""

    def flush(self) -> None:
        """Return when everything told is written."""


class Trainer:
    """Trains a policy with an objective, with NeMo-Aligner's life cycle (`fit`, `save`, `state_dict`)."""

    def __init__(
        self,
        settings: TrainerSettings,
        policy: Policy,
        objective: Objective,
        collector: StepCollector,
        timers: PhaseTimers,
        recorder: Recorder,
        evaluate: Callable[[], dict[str, float]],
        checkpoint_path: Callable[[int], Path],
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._objective = objective
        self._collector = collector
        self._timers = timers
        self._recorder = recorder
        self._evaluate = evaluate
        self._checkpoint_path = checkpoint_path
        self.step = 0
        self.consumed_prompts = 0

    def fit(self) -> None:
        """Train from the current step to `max_steps`."""
        settings = self._settings
        while self.step < settings.max_steps:
            self._timers.take()  # evaluating and saving are no part of a step
            metrics, kept, advantages = self._train_step()
            self.step += 1
            last = self.step == settings.max_steps
            if settings.eval_interval and self.step % settings.eval_interval == 0 and not last:
                metrics |= self._evaluate()
            # Recorded before it is saved: a run that resumes from a checkpoint finds its steps recorded.
            self._recorder.step(self.step, metrics, kept, advantages)
            if last or (settings.save_interval and self.step % settings.save_interval == 0):
                self._recorder.flush()
                self.save()

    def save(self) -> None:
        """Write the weights of the current step."""
        self._policy.save(self._checkpoint_path(self.step))

    def state_dict(self) -> dict[str, int]:
        """The trainer's own state; everything random is a function of it and the seed."""
        return {"step": self.step, "consumed_prompts": self.consumed_prompts}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the step that `state` was taken at."""
        self.step = state["step"]
        self.consumed_prompts = state["consumed_prompts"]

    def _train_step(self) -> tuple[dict[str, float], ScoredBatch | None, Tensor | None]:
        policy = self._policy
        policy.prepare_for_inference()
        collected = self._collector.collect(self.step, self.consumed_prompts)
        policy.finish_inference()
        self.consumed_prompts = collected.consumed_prompts

        metrics = {
            "step": self.step + 1,
            "consumed_prompts": self.consumed_prompts,
            "lr": self._learning_rate(),
        }
        metrics |= dict.fromkeys(UPDATE_METRICS, float("nan")) | rollout_metrics(collected)
        kept, advantages = None, None
        if collected.kept is not None:
            kept = whole_mini_batches(
                collected.kept, self._settings.prompts_per_step // self._settings.updates_per_rollout
            )
            advantages = self._advantages(kept)
            metrics |= self._update_on(kept, advantages)
        else:
            metrics |= {"update/skipped": self._settings.updates_per_rollout, "tokens/trained": 0}
        return metrics | self._timers.take(), kept, advantages

    def _advantages(self, kept: ScoredBatch) -> Tensor:
        settings = self._settings
        penalty = overlong_penalty(
            kept.rollouts.generation.lengths, settings.max_response_length, settings.overlong_fraction
        )
        return group_advantages(kept.rewards + penalty, kept.rollouts.groups, kept.valid, settings.advantage)

    def _update_on(self, kept: ScoredBatch, advantages: Tensor) -> dict[str, float]:
        settings, policy = self._settings, self._policy
        batch = TrainBatch(
            prompt_tokens=[kept.rollouts.prompts[group].tokens for group in kept.rollouts.groups.tolist()],
            response_tokens=kept.rollouts.generation.tokens,
            response_lengths=trained_lengths(kept),
            groups=kept.rollouts.groups,
            advantages=advantages,
            sampled_logprobs=kept.rollouts.generation.logprobs,
        )
        mini_batches = build_mini_batches(
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
        policy.prepare_for_training()
        mini_batches = self._measure(mini_batches, batch, kept.rewards)
        means = padding_mean(mini_batches)
        grad_norms, trained_tokens = [], 0
        for mini_batch in mini_batches:
            if self._objective.needs_minibatch_statistics:
                with self._timers.phase("old_stats"):
                    mini_batch = with_minibatch_statistics(
                        policy,
                        self._objective,
                        mini_batch,
                        stream_seed(settings.seed, "selection", self.step),
                    )
            with self._timers.phase("train"):
                policy.prepare_for_training_step()
                loss, update_means = policy.get_loss_and_metrics(mini_batch, forward_only=False)
                policy.finish_training_step()
                result = policy.optimizer_step(self._learning_rate())
            if result.skipped:  # its loss is not finite, and would hide those of the other updates
                continue
            grad_norms.append(result.grad_norm)
            trained_tokens += mini_batch.totals.tokens
            add_means(means, update_means)
            if loss is not None:
                add_means(means, {"loss": Mean(loss, torch.full_like(loss, 1.0 / policy.data_parallel_size))})
        policy.finish_training()
        return policy.reduce_metrics(means) | {
            "grad_norm": sum(grad_norms) / len(grad_norms) if grad_norms else float("nan"),
            "update/skipped": settings.updates_per_rollout - len(grad_norms),
            "tokens/trained": trained_tokens,
        }

    def _measure(self, mini_batches: list[MiniBatch], batch: TrainBatch, rewards: Tensor) -> list[MiniBatch]:
        """What the updates need of the weights that made the rollout and of the reference, once a rollout."""
        policy, objective = self._policy, self._objective
        with self._timers.phase("old_stats"):
            mini_batches = with_old_statistics(policy, mini_batches, first_too=objective.shapes_advantages)
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
