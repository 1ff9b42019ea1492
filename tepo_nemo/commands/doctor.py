"""`tepo-nemo doctor`"""

import argparse
from pathlib import Path

from tepo_nemo.commands.parser import Subparsers, add_command
from tepo_nemo.errors import UserError
from tepo_nemo.launch.outcome import ExitCode

_CHECKS = """checks:
  versions (against the NeMo container 25.02, or requirements/cpu.txt), packages that break others, MPI and
  torch ranks, GPUs and their links, the run directory, shared memory, open files, encoding.
  Exit code 1 where there is a problem. It runs on a login node too; in a job, start it as the ranks are:
  srun --mpi=pmix tepo-nemo doctor
"""


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    doctor = add_command(
        commands, "doctor", _run, "check this machine, and write a report for a bug report",
        "tepo-nemo doctor",
        "tepo-nemo doctor --output /scratch/me/runs/tepo --report doctor.md",
        details=_CHECKS,
    )  # fmt: skip
    doctor.add_argument(
        "--output", type=Path, default=Path("runs"), metavar="DIR", help="where runs will be (default: runs)"
    )
    doctor.add_argument(
        "--report", type=Path, metavar="FILE",
        help="write a page with all findings and versions, and no variables but those of launchers and NCCL",
    )  # fmt: skip


def _run(arguments: argparse.Namespace) -> int:
    from tepo_nemo.launch.doctor.report import examine, findings_table, report_page
    from tepo_nemo.runs.files import write_atomic
    from tepo_nemo.runs.tables import print_tables

    examination = examine(arguments.output)
    print_tables([findings_table(examination)])
    problems, warnings = examination.count("problem"), examination.count("warning")
    print(f"{problems} problems, {warnings} warnings")
    if arguments.report is not None:
        try:
            write_atomic(arguments.report, report_page(examination))
        except OSError as error:
            raise UserError(
                f"--report {arguments.report}: cannot be written ({error.strerror}); choose another file"
            ) from error
    return ExitCode.FAILED if problems else ExitCode.DONE
