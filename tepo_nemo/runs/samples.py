"""`samples/step_*.jsonl`: responses of a step with their grading, to be read by people."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tepo_nemo.runs.files import to_json, write_atomic


@dataclass(frozen=True)
class Sample:
    """One response, with what is needed to audit its grading by eye."""

    prompt_id: str
    prompt: str
    response: str
    gold: str
    extracted: str | None  # the answer that the grader compared with `gold`
    verdict: str  # status of the grading: ok, unparseable, timeout, error
    reward: float
    advantage: float
    length: int  # response tokens, the stop token included
    truncated: bool  # cut at the length limit without a stop token


def write_samples(path: Path, rows: Iterable[Sample]) -> None:
    """Writes one JSON object a response; a repeated step replaces its file."""
    write_atomic(path, "".join(to_json(asdict(row)) + "\n" for row in rows))
