"""`tepo-nemo plot`"""

import argparse
from pathlib import Path

from tepo_nemo.commands.parser import Subparsers, add_command
from tepo_nemo.launch.outcome import ExitCode


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    plot = add_command(commands, "plot", _run, "draw the pictures of a run", "tepo-nemo plot runs/toy")
    plot.add_argument("run", type=Path, metavar="RUN", help="a run directory")


def _run(arguments: argparse.Namespace) -> int:
    from tepo_nemo.runs.plots import plot_run

    for path in plot_run(arguments.run):
        print(path)
    return ExitCode.DONE
