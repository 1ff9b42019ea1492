"""Collects the scored rollouts of a step: generate, grade, and sample dynamically.

Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476) drops groups whose correctness scores are all
equal, since their advantages are zero, and asks for further prompts until the step is full or
`max_generation_batches` batches are generated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tepo_nemo.data.order import PromptOrder
from tepo_nemo.rollout.batch import ScoredBatch, TokenizedPrompt, concatenate_scored
from tepo_nemo.rollout.generate import generate
from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.rollout.sampling import stream_seed
from tepo_nemo.rollout.scoring import Grader
from tepo_nemo.training.policy import Policy
from tepo_nemo.training.timers import PhaseTimers


@dataclass(frozen=True)
class CollectedStep:
    """The rollouts of a step."""

    kept: ScoredBatch | None  # the groups to train on; None where no group is worth it
    generated: ScoredBatch  # everything that was generated
    kept_groups: Sequence[int]  # which of the generated groups are kept
    consumed_prompts: int  # prompts taken from the order, over the whole run


def has_spread(scored: ScoredBatch, group: int) -> bool:
    """Whether the correctness of a group's valid responses differs, so that it has something to teach."""
    correctness = scored.correctness[(scored.rollouts.groups == group) & scored.valid]
    return len(correctness) > 1 and bool(correctness.max() > correctness.min())


class Collector(Protocol):
    """Where the rollouts of a step come from; called by all ranks."""

    generates: bool  # whether the policy has to be ready for inference

    def collect(self, step: int, consumed_prompts: int) -> CollectedStep:
        """The rollouts of the step after `step` steps, which have taken `consumed_prompts` prompts."""
        ...


class StepCollector:
    """Fills a step with groups of responses; implements `Collector`."""

    generates = True

    def __init__(
        self,
        policy: Policy,
        grader: Grader,
        prompts: Sequence[TokenizedPrompt],
        order: PromptOrder,
        timers: PhaseTimers,
        check_stop: Callable[[], None],
        *,
        seed: int,
        prompts_per_step: int,
        responses_per_prompt: int,
        temperature: float,
        max_response_length: int,
        prompts_at_once: int | None,
        dynamic_sampling: bool,
        max_generation_batches: int,
    ) -> None:
        self._policy = policy
        self._grader = grader
        self._prompts = prompts
        self._order = order
        self._timers = timers
        self._check_stop = check_stop
        self._seed = seed
        self._prompts_per_step = prompts_per_step
        self._responses_per_prompt = responses_per_prompt
        self._temperature = temperature
        self._max_response_length = max_response_length
        self._prompts_at_once = prompts_at_once
        self._dynamic_sampling = dynamic_sampling
        self._max_generation_batches = max_generation_batches if dynamic_sampling else 1

    def collect(self, step: int, consumed_prompts: int) -> CollectedStep:
        """Generate and grade until the step is full; at most `prompts_per_step` groups are kept.

        Raises Stopped before a batch; what was generated is then forgotten, since the same weights generate
        it again.
        """
        generated: list[ScoredBatch] = []
        kept: list[ScoredBatch] = []
        kept_groups: list[int] = []
        missing = self._prompts_per_step
        while missing > 0 and len(generated) < self._max_generation_batches:
            indices = self._order.take(consumed_prompts, self._prompts_per_step)
            consumed_prompts += self._prompts_per_step
            rollouts = generate(
                self._timed_infer,
                [self._prompts[index] for index in indices],
                samples=self._responses_per_prompt,
                # A prompt that comes twice in a step (a small data set) must not be answered the same.
                seed=stream_seed(self._seed, f"rollout/{len(generated)}", step),
                temperature=self._temperature,
                max_response_length=self._max_response_length,
                prompts_at_once=self._prompts_at_once,
            )
            scored = self._grader.score(rollouts)
            generated.append(scored)
            groups = [
                group
                for group in range(len(indices))
                if not self._dynamic_sampling or has_spread(scored, group)
            ]
            if groups := groups[:missing]:
                earlier = sum(len(part.rollouts.prompts) for part in generated[:-1])
                kept.append(scored.select_groups(groups))
                kept_groups += [earlier + group for group in groups]
                missing -= len(groups)
        return CollectedStep(
            kept=concatenate_scored(kept) if kept else None,
            generated=concatenate_scored(generated),
            kept_groups=kept_groups,
            consumed_prompts=consumed_prompts,
        )

    def _timed_infer(self, request: GenerationRequest) -> Generation:
        self._check_stop()
        with self._timers.phase("rollout"):
            return self._policy.infer(request)


def whole_mini_batches(scored: ScoredBatch, prompts_per_update: int) -> ScoredBatch:
    """The groups that fill whole mini-batches; of a step with less than one mini-batch, all there are."""
    groups = len(scored.rollouts.prompts)
    usable = max(groups // prompts_per_update * prompts_per_update, min(groups, prompts_per_update))
    return scored if usable == groups else scored.select_groups(range(usable))


def trained_lengths(scored: ScoredBatch) -> Tensor:
    """[R] int64: response lengths, 0 for responses that are not trained on since their grading failed."""
    return torch.where(scored.valid, scored.rollouts.generation.lengths, 0)
