"""What is kept of an evaluation: one line a problem, with every answer and its grading."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tepo_nemo.reward.result import RewardResult
from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.runs.files import read_json_lines, to_json


@dataclass(frozen=True)
class AnswerRecord:
    """One answer of the model."""

    response: str
    extracted: str | None  # what was compared with the gold
    status: str  # of the grading: ok, unparseable, timeout, error
    value: float  # 0 where the grading failed
    length: int  # tokens, the stop token included
    truncated: bool  # cut at the length limit


@dataclass(frozen=True)
class ProblemRecord:
    """A problem of a benchmark and all answers to it."""

    benchmark: str
    id: str
    gold: str
    answers: Sequence[AnswerRecord]

    @property
    def average(self) -> float:
        """Mean over the answers; one that could not be graded counts 0."""
        return sum(answer.value for answer in self.answers) / len(self.answers)


def records_of(benchmark: str, scored: ScoredBatch) -> list[ProblemRecord]:
    """The problems of a graded batch, in the order of its prompts."""
    generation = scored.rollouts.generation
    answers: list[list[AnswerRecord]] = [[] for _ in scored.rollouts.prompts]
    rows = zip(
        scored.rollouts.groups.tolist(),
        scored.texts,
        scored.results,
        generation.lengths.tolist(),
        generation.finished.tolist(),
        strict=True,
    )
    for group, text, result, length, finished in rows:
        answers[group].append(_answer(text, result, length, finished))
    return [
        ProblemRecord(benchmark, prompt.id, prompt.gold, of_prompt)
        for (prompt, _), of_prompt in zip(scored.rollouts.prompts, answers, strict=True)
    ]


def _answer(text: str, result: RewardResult, length: int, finished: bool) -> AnswerRecord:
    value = 0.0 if result.failed else result.correct
    return AnswerRecord(text, result.extracted, result.status, value, length, truncated=not finished)


class RecordFile:
    """Problems that are done, in a file to which further ones are added as they are.

    What a killed process has left incomplete at its end is cut off: that problem is not done.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            content = path.read_bytes()
            if not content.endswith(b"\n"):
                with open(path, "r+b") as file:
                    file.truncate(content.rfind(b"\n") + 1)

    def append(self, records: Iterable[ProblemRecord]) -> None:
        """Write problems down; they are on the disk when this returns."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("".join(to_json(asdict(record)) + "\n" for record in records))
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> Iterator[ProblemRecord]:
        """All problems that are done."""
        if self._path.exists():
            for _, fields in read_json_lines(self._path):
                answers = [AnswerRecord(**answer) for answer in fields.pop("answers")]
                yield ProblemRecord(answers=answers, **fields)
