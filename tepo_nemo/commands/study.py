"""`tepo-nemo study`"""

import argparse
import sys
from pathlib import Path

from tepo_nemo.commands.parser import Subparsers, add_command
from tepo_nemo.launch.outcome import ExitCode, print_error

_RESUME = """resume:
  The same command continues a study: finished cells are not run again, others start from their beginning.
  Exit code 1 says that cells have failed; the others have run, and the report is written.
"""


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    study = add_command(
        commands, "study", _run, "run experiments x seeds and compare them in a report",
        "tepo-nemo study configs/study/paper_mini.yaml --output runs/paper_mini",
        "tepo-nemo study paper_mini --output runs/paper_mini --only TEPO GRPO/DAPO",
        details=_RESUME,
    )  # fmt: skip
    study.add_argument(
        "study", type=Path, metavar="STUDY", help="a study file, or the name of one in configs/study"
    )
    study.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="a new folder, or one to continue"
    )
    study.add_argument("--only", nargs="+", metavar="LABEL", help="run the cells of these experiments alone")
    study.add_argument("--report-only", action="store_true", help="run nothing: report what is finished")


def _run(arguments: argparse.Namespace) -> int:
    from tepo_nemo.launch.local import describe_failure
    from tepo_nemo.launch.pool import run_jobs
    from tepo_nemo.launch.run import check_local_run
    from tepo_nemo.study.command import run_study
    from tepo_nemo.study.run import Launcher

    train = [sys.executable, "-m", "tepo_nemo.cli", "train", "--config"]
    launcher = Launcher(check_local_run, train, run_jobs, describe_failure)
    outcome = run_study(
        arguments.study, arguments.output, launcher, only=arguments.only, run=not arguments.report_only
    )
    if outcome.interrupted:
        print_error("stopped; the same command runs the cells that are left")
        return ExitCode.STOPPED
    if outcome.failed:
        print_error(f"failed: {'; '.join(cell.name for cell in outcome.failed)} (see above)")
        return ExitCode.FAILED
    return ExitCode.DONE
