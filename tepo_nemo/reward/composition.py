"""A reward made of several: their weighted sum."""

from collections.abc import Sequence
from dataclasses import dataclass

from tepo_nemo.reward.result import RewardFunction, RewardResult


@dataclass(frozen=True)
class WeightedSum:
    """The sum of weight times value of each part.

    The first part says whether the response is correct: its value, without its weight, is the `correctness`
    by which dynamic sampling filters groups and evaluation scores. Its status and its extracted answer are
    those of the whole. One part that failed makes the whole a failure: a reward without one of its parts
    would be another reward.
    """

    parts: Sequence[tuple[RewardFunction, float]]  # with their weights

    def __call__(self, prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
        results = [function(prompt, response_text, gold, metadata) for function, _ in self.parts]
        for result in results:
            if result.failed:
                return RewardResult(0.0, result.status, results[0].extracted)
        value = sum(weight * result.value for (_, weight), result in zip(self.parts, results, strict=True))
        return RewardResult(value, results[0].status, results[0].extracted, correctness=results[0].value)

    @property
    def in_process(self) -> bool:
        """Whether none of the parts can hang."""
        return all(getattr(function, "in_process", False) for function, _ in self.parts)
