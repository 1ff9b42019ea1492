"""`tepo-nemo study`: what to run, in which folder, and the report that it ends in."""

import fcntl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.config.messages import nearest
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import require_new_folder, write_atomic
from tepo_nemo.study.plan import make_plan
from tepo_nemo.study.run import RunJobs, run_cells
from tepo_nemo.study.schema import Study, find_study, load_study

_COPY = "study.yaml"  # of the study file; says that a folder is that of a study
_DONE, _FAILED, _STOPPED = 0, 1, 3  # launch.outcome.ExitCode


@dataclass(frozen=True)
class Launcher:
    """What `launch` does for a study, which knows nothing of it."""

    check: Callable[[Config], None]
    """Finds what is wrong with a run before it starts (UserError)."""
    run_jobs: RunJobs
    describe_failure: Callable[[Path, int], str]


def run_study(
    path: Path, output: Path, launcher: Launcher, *, only: Sequence[str] | None = None, run: bool = True
) -> int:
    """Run the cells that are not finished yet and write the report; returns the exit code.

    Args:
        path: the study file, or the name of a shipped one.
        output: a new folder, or that of an earlier call, which this one continues.
        only: labels of the experiments to run; None for all.
        run: False writes the report alone.

    Raises:
        UserError: a mistake in the file or in any configuration, before the first cell is run.
    """
    path = find_study(path)
    study = load_study(path)
    for label in only or ():
        if label not in study.labels:
            raise UserError(
                f"--only {label}: no experiment of {path} has this label; {nearest(label, study.labels)}"
            )
    plan = make_plan(study, output, launcher.check if run else lambda config: None)
    with _folder(output):
        write_atomic(output / _COPY, path.read_text(encoding="utf-8"))
        failed = []
        if run:
            interrupted, failed = run_cells(
                plan.cells(only),
                at_once=study.jobs,
                run_jobs=launcher.run_jobs,
                describe_failure=launcher.describe_failure,
                stream=sys.stdout,
            )
            if interrupted:
                print(f"stopped; the same command goes on with the cells that are left ({output})")
                return _STOPPED
        _report(study, output)
    return _FAILED if failed else _DONE


@contextmanager
def _folder(output: Path) -> Iterator[None]:
    """The folder of the study, made or continued, and for this process alone while the block runs."""
    if not (output / _COPY).exists():
        require_new_folder(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = open(output / ".lock", "w")
    except OSError as error:
        raise UserError(
            f"--output {output}: cannot be written ({error.strerror}); choose another folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"--output {output}: another process runs this study; wait for it") from error
        yield


def _report(study: Study, output: Path) -> None:
    print(output)
