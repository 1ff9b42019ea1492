"""The cells of a study, run by `tepo-nemo train`, as many side by side as the study says."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from tepo_nemo.config.schema import Config
from tepo_nemo.study.plan import Cell
from tepo_nemo.study.progress import StudyProgress


@dataclass(frozen=True)
class Launcher:
    """What `launch` does for a study, which knows nothing of it."""

    check: Callable[[Config], None]
    """Finds what is wrong with a run before it starts (UserError)."""
    train: Sequence[str]
    """The command that trains; the path of a configuration file comes after it."""
    run_jobs: Callable[..., bool]
    """`launch.pool.run_jobs`: runs commands side by side, and ends them at a signal."""
    describe_failure: Callable[[Path, int], str]
    """What a failed command says, from its log and its exit code."""


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
    cells: Sequence[Cell], launcher: Launcher, *, at_once: int, before: int, stream: TextIO
) -> Outcome:
    """Run cells from their beginning; one that fails is told, and the others go on.

    Args:
        at_once: cells side by side.
        before: cells that earlier calls have finished, for the count that a person sees.
        stream: where a person reads.
    """
    failed: list[Cell] = []
    progress = StudyProgress(cells, before, stream)

    def ended(job: CellJob, code: int) -> None:
        failure = None
        if code != 0 or not job.cell.is_finished():
            failure = f"{launcher.describe_failure(job.log, code)} (see {job.log})"
            failed.append(job.cell)
        progress.ended(job.cell, failure)

    try:
        jobs = _jobs(cells, launcher.train, progress)
        complete = launcher.run_jobs(jobs, at_once=at_once, ended=ended, watch=progress.look)
    finally:
        progress.close()
    return Outcome(not complete, failed)


def _jobs(cells: Iterable[Cell], train: Sequence[str], progress: StudyProgress) -> Iterator[CellJob]:
    """What each cell's command needs is made when its turn has come."""
    for cell in cells:
        cell.prepare()
        progress.started(cell)
        yield CellJob([*train, str(cell.config_file)], cell.log, cell)
