"""`tepo-nemo grade`"""

import argparse
from pathlib import Path

from tepo_nemo.commands.parser import Subparsers, add_command, positive
from tepo_nemo.launch.outcome import ExitCode

_GRADED_ROWS = """rows of the file:
  gold          the right answer
  response      what the model wrote
  form          answer (the response is a final answer) or response (the answer is in its last box)
  expected      optional: true or false, the right verdict
  timeout_ok    optional: true where running out of time is right, too
  metadata      optional: an object with the rules of the gold's set (answer_form, unit, error, ...)

output:
  LINE  right|wrong  STATUS  GOLD  ANSWER            a row
  disagreement LINE: ...                             a row whose verdict is not the expected one
  agreement N / M                                    last: of the rows with `expected`
"""


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    grade = add_command(
        commands, "grade", _run, "audit the grader of mathematical answers on a file of pairs",
        "tepo-nemo grade pairs.jsonl",
        "tepo-nemo grade --time-limit 3 pairs.jsonl",
        details=_GRADED_ROWS,
    )  # fmt: skip
    grade.add_argument("file", type=Path, metavar="FILE", help="JSON lines, see below")
    grade.add_argument("--workers", type=positive(int), metavar="N", help="processes (default: 8)")
    grade.add_argument(
        "--time-limit", type=positive(float), metavar="S", help="seconds for one response (default: 10)"
    )


def _run(arguments: argparse.Namespace) -> int:
    from tepo_nemo.config.schema import GradingConfig
    from tepo_nemo.reward.audit import audit
    from tepo_nemo.reward.pool import PoolSettings

    grading = GradingConfig()
    settings = PoolSettings(
        workers=grading.workers if arguments.workers is None else arguments.workers,
        time_limit_s=grading.time_limit if arguments.time_limit is None else arguments.time_limit,
        memory_limit_gib=grading.memory_limit_gib,
        max_tasks=grading.max_tasks,
        response_tail=grading.response_tail,
        alarm_fraction=1.0,  # every row is shown
    )
    for line in audit(arguments.file, settings):
        print(line)
    return ExitCode.DONE
