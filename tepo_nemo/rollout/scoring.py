"""From responses to rewards."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tepo_nemo.reward.grading import RewardFunction, grade_batch
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.rollout.batch import RolloutBatch, ScoredBatch


class Ranks(Protocol):
    """What grading needs to know of the other ranks."""

    is_main: bool

    def broadcast_from_main(self, value: Any) -> Any:
        """The main rank's `value` on every rank."""
        ...


class Grader:
    """Turns rollouts into scored rollouts; one rank grades and the others are told."""

    def __init__(
        self, ranks: Ranks, reward: RewardFunction, detokenize: Callable[[Sequence[int]], str]
    ) -> None:
        self._ranks = ranks
        self._reward = reward
        self._detokenize = detokenize

    def score(self, rollouts: RolloutBatch) -> ScoredBatch:
        """Texts (without the stop token) and rewards of all responses."""
        results: list[RewardResult] | None = None
        texts = self._texts(rollouts)
        if self._ranks.is_main:
            prompts = [rollouts.prompts[group].prompt for group in rollouts.groups.tolist()]
            results = grade_batch(
                self._reward,
                [
                    (prompt.prompt, text, prompt.gold, prompt.metadata)
                    for prompt, text in zip(prompts, texts, strict=True)
                ],
            )
        return ScoredBatch(rollouts, texts, self._ranks.broadcast_from_main(results))

    def _texts(self, rollouts: RolloutBatch) -> list[str]:
        generation = rollouts.generation
        ends = generation.lengths - generation.finished.long()
        return [
            self._detokenize(tokens[:end])
            for tokens, end in zip(generation.tokens.tolist(), ends.tolist(), strict=True)
        ]
