"""`tepo-nemo bench step`: what is measured, and the files and tables that it ends in."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tepo_nemo.bench.step import names
from tepo_nemo.bench.step.job import Case, Job
from tepo_nemo.bench.step.workload import MODELS, Workload
from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import require_new_folder, write_atomic

StartRanks = Callable[..., int]
"""`launch.local.run_ranks`."""

_RANKS = 2
_WORK = {
    "toy": Workload("toy", "skewed", prompts=32, responses_per_prompt=4, updates=8, median_length=12),
    "wide": Workload("wide", "skewed", prompts=16, responses_per_prompt=4, updates=8, median_length=12),
}
# Long enough that padding costs more than another micro-batch, as it does at the paper's lengths.
_LONG = Workload("toy", "skewed", prompts=16, responses_per_prompt=4, updates=8, median_length=160)
_SCALED_UPDATES = 2
_GRADED_BATCHES = 4
_SMALL = {"prompts": 4, "responses_per_prompt": 2, "updates": 4}


@dataclass(frozen=True)
class Options:
    """What to measure."""

    output: Path
    models: tuple[str, ...] = tuple(MODELS)
    rounds: int = 2
    generation_pairs: int = 2
    small: bool = False  # a look at the command itself

    def __post_init__(self) -> None:
        """Raises UserError."""
        for model in self.models:
            if model not in MODELS:
                raise UserError(f"--model {model}: is not one of {', '.join(MODELS)}")
        if self.rounds < 1:
            raise UserError(f"--rounds {self.rounds}: must be at least 1")
        cores = len(os.sched_getaffinity(0))
        if cores < _RANKS:
            raise UserError(
                f"bench step: needs {_RANKS} cores, one for each rank, and finds {cores} (give it more)"
            )
        require_new_folder(self.output)

    def cases(self) -> Iterator[Case]:
        """All tables; the names start with the model's."""
        for model in self.models:
            work = _WORK[model]
            if self.small:
                work = replace(work, **_SMALL, median_length=3)
            yield Case(
                f"{model}-skewed",
                work,
                self.rounds,
                aligner=True,
                single=True,
                # One by one on the smaller model; a step of the larger one takes too long for that.
                levers=names.LEVERS if model == "toy" else (names.BALANCE, names.ALL),
                generation_pairs=self.generation_pairs,
            )
            equal, one_update = replace(work, lengths="equal"), replace(work, updates=1)
            scaled = replace(work, updates=min(_SCALED_UPDATES, work.updates))
            copies = replace(work, tensor=1, data=_RANKS)
            yield Case(f"{model}-equal", equal, self.rounds, aligner=True, single=True)
            yield Case(f"{model}-one-update", one_update, rounds=0)
            yield Case(
                f"{model}-grading", work, self.rounds, levers=(names.OVERLAP,), batches=_GRADED_BATCHES
            )
            yield Case(f"{model}-scaling", scaled, self.rounds, scaled=True)
            yield Case(f"{model}-copies", copies, rounds=0, aligner=True, levers=(names.BALANCE,))
        if _LONG.model in self.models:
            long = replace(_LONG, **_SMALL, median_length=20) if self.small else _LONG
            # As many responses for each copy: of eight the longest alone is more than half of the work.
            copies = replace(long, tensor=1, data=_RANKS, prompts=_RANKS * long.prompts)
            for name, work in {"long": long, "long-copies": copies}.items():
                name = f"{_LONG.model}-{name}"
                yield Case(name, work, rounds=0, levers=(names.BALANCE,), balanced=True)


QUICK = {"models": ("toy",), "rounds": 1, "generation_pairs": 1, "small": True}
"""Options for a look at the command itself; its times mean nothing."""


def bench(options: Options, start_ranks: StartRanks, console: str) -> int:
    """Measure on ranks of this machine and write step.{json,md,png}; returns the exit code.

    Args:
        start_ranks: starts a command as ranks 0 to n - 1 and waits for them.
        console: the environment variable that tells rank 0 the descriptor of the terminal.
    """
    measured: list[dict[str, Any]] = []
    cases = list(options.cases())
    for tensor in sorted({case.workload.tensor for case in cases}, reverse=True):
        of_layout = tuple(case for case in cases if case.workload.tensor == tensor)
        print(f"tensor-parallel size {tensor}, data-parallel size {_RANKS // tensor}", flush=True)
        folder = options.output / "logs" / f"tp{tensor}"
        folder.mkdir(parents=True)
        for case in of_layout:
            case.write(folder)
        job = Job(of_layout, folder, console)
        job.write(folder / "job.json")
        code = start_ranks(
            [sys.executable, "-m", "tepo_nemo.bench.step.rank", str(folder / "job.json")],
            ranks=_RANKS,
            logs=folder,
            environment={"OMP_NUM_THREADS": "1"},
        )
        if code != 0:
            return code
        measured += json.loads(job.results.read_text())
    _report(options, {case["name"]: case for case in measured})
    return 0


def _report(options: Options, cases: dict[str, dict[str, Any]]) -> None:
    from tepo_nemo.bench.machine import describe_machine, versions
    from tepo_nemo.bench.step.bounds import bounds_of
    from tepo_nemo.bench.step.picture import draw
    from tepo_nemo.bench.step.report import all_tables, main_tables
    from tepo_nemo.bench.step.shares import PAPER, RANKS, count_shares
    from tepo_nemo.runs.tables import print_tables, to_markdown

    shares = [count_shares(PAPER, ranks)._asdict() for ranks in RANKS]
    results = {
        "machine": describe_machine(),
        "versions": versions(),
        "cases": cases,
        "shares": shares,
        "bounds": bounds_of(cases, shares),
    }
    write_atomic(options.output / "step.json", json.dumps(results, indent=1) + "\n")
    write_atomic(options.output / "step.md", to_markdown("tepo-nemo bench step", all_tables(results)))
    draw(cases, options.output / "step.png")
    print_tables(main_tables(results))
    print(options.output)
