"""From responses to rewards."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from tepo_nemo.reward.grading import grade_batch
from tepo_nemo.reward.pool import RewardPool
from tepo_nemo.reward.result import RewardFunction, RewardResult
from tepo_nemo.rollout.batch import RolloutBatch, ScoredBatch, concatenate_scored


class Ranks(Protocol):
    """What grading needs to know of the other ranks."""

    is_main: bool

    def broadcast_from_main(self, value: Any) -> Any:
        """The main rank's `value` on every rank."""
        ...


class Grader:
    """Turns rollouts into scored rollouts; the main rank grades and the others are told.

    Grading runs in a thread of its own, so that the next responses can be generated meanwhile: in this
    process with a function, in killable ones with a pool.
    """

    def __init__(
        self, ranks: Ranks, reward: RewardFunction | RewardPool, detokenize: Callable[[Sequence[int]], str]
    ) -> None:
        self._ranks = ranks
        self._reward = reward
        self._detokenize = detokenize
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grader")

    def submit(self, rollouts: RolloutBatch) -> Callable[[], ScoredBatch]:
        """Start to grade; what is returned waits for the rewards.

        All ranks submit the same rollouts, and call what they get in the same order.
        """
        grading = self._thread.submit(self._grade, rollouts) if self._ranks.is_main else None

        def wait() -> ScoredBatch:
            texts, results = ([""] * len(rollouts), None) if grading is None else grading.result()
            return ScoredBatch(rollouts, texts, self._ranks.broadcast_from_main(results))

        return wait

    def score(self, batches: Iterable[RolloutBatch]) -> ScoredBatch:
        """Grade all batches, each while the next one is generated."""
        return concatenate_scored([wait() for wait in [self.submit(batch) for batch in batches]])

    def close(self) -> None:
        """End the processes of a pool."""
        if isinstance(self._reward, RewardPool):
            self._reward.close()

    def _grade(self, rollouts: RolloutBatch) -> tuple[list[str], list[RewardResult]]:
        """A response of length 0 is none: it has no text, and its grading has failed."""
        prompts = [rollouts.prompts[group].prompt for group in rollouts.groups.tolist()]
        texts = self._texts(rollouts)
        answered = rollouts.generation.lengths.nonzero().flatten().tolist()
        items = [
            (prompts[row].prompt, texts[row], prompts[row].gold, prompts[row].metadata) for row in answered
        ]
        if isinstance(self._reward, RewardPool):
            graded = self._reward.grade(items)
        else:
            graded = grade_batch(self._reward, items)
        results = [RewardResult(0.0, "error")] * len(rollouts)
        for row, result in zip(answered, graded, strict=True):
            results[row] = result
        return texts, results

    def _texts(self, rollouts: RolloutBatch) -> list[str]:
        """Without the stop token."""
        generation = rollouts.generation
        ends = generation.lengths - generation.finished.long()
        return [
            self._detokenize(tokens[:end])
            for tokens, end in zip(generation.tokens.tolist(), ends.tolist(), strict=True)
        ]
