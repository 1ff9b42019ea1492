"""What the ranks of one layout are asked to measure, as a file between two processes."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tepo_nemo.bench.step.names import TWICE_LENGTHS, TWICE_PROMPTS, TWICE_RESPONSES
from tepo_nemo.bench.step.workload import Workload


@dataclass(frozen=True)
class Case:
    """One table: rows that take turns on a workload; the first of ours is as the product is.

    Args:
        rounds: timed steps of each row, after one that is counted.
        aligner: beside NeMo-Aligner's trainer.
        single: ours with micro-batches of one response too.
        scaled: ours also with twice the prompts, the responses and the lengths.
        levers: names of what is switched off in a row of its own.
        batches: of a step's responses, graded one after the other; one batch is graded at once.
        generation_pairs: timed pairs of generation alone; 0 for none.
        balanced: responses are so long that little padding and imbalance is promised.
    """

    name: str
    workload: Workload
    rounds: int
    aligner: bool = False
    single: bool = False
    scaled: bool = False
    levers: tuple[str, ...] = ()
    batches: int = 1
    generation_pairs: int = 0
    balanced: bool = False

    def workloads(self) -> dict[str, Workload]:
        """Of the rows that have one of their own, by their names."""
        work = self.workload
        if not self.scaled:
            return {}
        return {
            TWICE_PROMPTS: replace(work, prompts=2 * work.prompts),
            TWICE_RESPONSES: replace(work, responses_per_prompt=2 * work.responses_per_prompt),
            TWICE_LENGTHS: replace(work, median_length=2 * work.median_length),
        }

    def write(self, folder: Path) -> None:
        """Make the files that the workloads read."""
        for workload in (self.workload, *self.workloads().values()):
            workload.write(folder)


@dataclass(frozen=True)
class Job:
    cases: tuple[Case, ...]
    folder: Path  # for inputs, run directories and results
    console: str  # environment variable with the descriptor of the terminal

    @property
    def results(self) -> Path:
        return self.folder / "results.json"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self) | {"folder": str(self.folder)}))

    @classmethod
    def read(cls, path: Path) -> "Job":
        fields = json.loads(path.read_text())
        cases = (
            Case(**case | {"workload": Workload(**case["workload"]), "levers": tuple(case["levers"])})
            for case in fields["cases"]
        )
        return cls(tuple(cases), Path(fields["folder"]), fields["console"])
