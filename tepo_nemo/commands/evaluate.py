"""`tepo-nemo eval`"""

import argparse
from pathlib import Path

from tepo_nemo.commands.parser import OVERRIDES, Subparsers, add_command, add_config_arguments

_EVALUATION = """benchmarks:
  data.evaluation lists them: name, path, samples, temperature, k; data=math has the paper's seven.
  A benchmark's problems that also occur in data.train are found, and scores are given with and without them.

output:
  problems.jsonl  one line a problem: its answers with their grading
  report.json     all scores: avg@k, pass@k, majority@k, both averages, intervals, counts
  table.txt       the same in the paper's layout, beside the paper's rows
  The same command again goes on where an evaluation was interrupted.
"""


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    evaluate = add_command(
        commands, "eval", _run, "evaluate a checkpoint on benchmarks, or go on where one was interrupted",
        "tepo-nemo eval --checkpoint runs/toy",
        "tepo-nemo eval --checkpoint runs/toy/checkpoints/step_000010.nemo --benchmarks toy output=scores/10",
        "tepo-nemo eval --checkpoint MODEL.nemo --benchmarks amc,minerva data=math output=scores/model",
        details=OVERRIDES + _EVALUATION,
    )  # fmt: skip
    evaluate.add_argument(
        "--checkpoint", type=Path, metavar="PATH",
        help="a .nemo file, or a run directory, of which the last checkpoint is taken",
    )  # fmt: skip
    evaluate.add_argument(
        "--benchmarks",
        type=lambda names: names.split(","),
        metavar="NAME,NAME",
        help="of data.evaluation (default: all of them)",
    )
    add_config_arguments(evaluate)


def _run(arguments: argparse.Namespace) -> int:
    from tepo_nemo.launch.evaluate import evaluation_config, start_local_evaluation

    return start_local_evaluation(
        evaluation_config(arguments.overrides, arguments.config, arguments.checkpoint, arguments.benchmarks)
    )
