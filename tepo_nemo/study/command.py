"""`tepo-nemo study`: what to run, in which folder, and the report that it ends in."""

import fcntl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tepo_nemo.config.messages import nearest
from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import require_new_folder, write_atomic
from tepo_nemo.study.plan import make_plan
from tepo_nemo.study.report import write_report
from tepo_nemo.study.run import Launcher, Outcome, run_cells
from tepo_nemo.study.schema import find_study, load_study

_COPY = "study.yaml"  # of the study file; says that a folder is that of a study


def run_study(
    path: Path, output: Path, launcher: Launcher, *, only: Sequence[str] | None = None, run: bool = True
) -> Outcome:
    """Run the cells that are not finished yet and write the report; without one where a signal comes.

    Args:
        path: the study file, or the name of a shipped one.
        output: a new folder, or that of an earlier call, which this one continues.
        only: labels of the experiments to run; None for all.
        run: False writes the report alone.

    Raises:
        UserError: a mistake in the file or in any configuration, or a finished cell that has another one;
            before the first cell is run.
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
        finished = plan.finished()
        write_atomic(output / _COPY, path.read_text(encoding="utf-8"))
        outcome = Outcome(False, [])
        if run:
            cells = plan.cells(only)
            outcome = run_cells(
                [cell for cell in cells if cell not in finished],
                launcher,
                at_once=study.jobs,
                before=len(finished.intersection(cells)),
                stream=sys.stdout,
            )
        if not outcome.interrupted:
            write_report(study, plan, output)
            print(output)
    return outcome


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
