"""From the scored responses of a step to the mini-batches of its updates."""

from torch import Tensor

from tepo_nemo.objectives.advantage import group_advantages, overlong_penalty
from tepo_nemo.objectives.contract import Objective
from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.training.balance import MicroBatchLimits
from tepo_nemo.training.batch import MiniBatch, TrainBatch
from tepo_nemo.training.collect import trained_lengths
from tepo_nemo.training.minibatch import build_mini_batches
from tepo_nemo.training.policy import Policy
from tepo_nemo.training.settings import TrainerSettings
from tepo_nemo.training.shaping import with_shaped_advantages
from tepo_nemo.training.statistics import with_old_statistics, with_reference_logprobs
from tepo_nemo.training.timers import PhaseTimers


class Preparation:
    """Makes the updates of a step ready, for one policy and objective."""

    def __init__(
        self, settings: TrainerSettings, policy: Policy, objective: Objective, timers: PhaseTimers
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._objective = objective
        self._timers = timers

    def advantages(self, kept: ScoredBatch) -> Tensor:
        """[R] fp32, of the responses of whole groups."""
        settings = self._settings
        penalty = overlong_penalty(
            kept.rollouts.generation.lengths, settings.max_response_length, settings.overlong_fraction
        )
        return group_advantages(kept.rewards + penalty, kept.rollouts.groups, kept.valid, settings.advantage)

    def train_batch(self, kept: ScoredBatch, advantages: Tensor) -> TrainBatch:
        """The responses as they are trained on."""
        return TrainBatch(
            prompt_tokens=[kept.rollouts.prompts[group].tokens for group in kept.rollouts.groups.tolist()],
            response_tokens=kept.rollouts.generation.tokens,
            response_lengths=trained_lengths(kept),
            groups=kept.rollouts.groups,
            advantages=advantages,
            sampled_logprobs=kept.rollouts.generation.logprobs,
        )

    def cut(self, batch: TrainBatch) -> list[MiniBatch]:
        """This rank's shares of the updates."""
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

    def measure(
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
