"""The cells of a study, run by `tepo-nemo train`, as many side by side as the study says."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from tepo_nemo.study.plan import Cell
from tepo_nemo.study.progress import StudyProgress

RunJobs = Callable[..., bool]
"""`launch.pool.run_jobs`."""


class CellJob(NamedTuple):
    """The command of a cell: a job of `launch.pool`."""

    command: Sequence[str]
    log: Path
    cell: Cell


class Outcome(NamedTuple):
    """How the cells of one call have ended."""

    interrupted: bool
    failed: list[Cell]


def run_cells(
    cells: Sequence[Cell],
    *,
    at_once: int,
    run_jobs: RunJobs,
    describe_failure: Callable[[Path, int], str],
    stream: TextIO,
) -> Outcome:
    """Run those cells that are not finished; one that fails is told, and the others go on.

    Args:
        at_once: cells side by side.
        run_jobs: runs commands side by side, and ends them at a signal.
        describe_failure: what a failed command says, from its log and its exit code.
        stream: where a person reads.

    Raises:
        UserError: a finished cell has another configuration; before any cell is run.
    """
    waiting = [cell for cell in cells if not cell.is_finished()]
    failed: list[Cell] = []
    progress = StudyProgress(waiting, len(cells) - len(waiting), stream)

    def ended(job: CellJob, code: int) -> None:
        failure = None
        if code != 0 or not job.cell.is_finished():
            failure = f"{describe_failure(job.log, code)} (see {job.log} and {job.cell.run.logs})"
            failed.append(job.cell)
        progress.ended(job.cell, failure)

    try:
        jobs = _jobs(waiting, progress)
        complete = run_jobs(jobs, at_once=at_once, ended=ended, watch=progress.look)
    finally:
        progress.close()
    return Outcome(not complete, failed)


def _jobs(cells: Iterable[Cell], progress: StudyProgress) -> Iterator[CellJob]:
    """What each cell's command needs is made when its turn has come."""
    for cell in cells:
        cell.prepare()
        progress.started(cell)
        command = [sys.executable, "-m", "tepo_nemo.cli", "train", "--config", str(cell.config_file)]
        yield CellJob(command, cell.log, cell)
