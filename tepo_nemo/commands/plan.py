"""`tepo-nemo plan`"""

import argparse

from tepo_nemo.commands.parser import OVERRIDES, Subparsers, add_command, add_config_arguments
from tepo_nemo.launch.outcome import ExitCode

_DETAILS = """Memory of a GPU is counted part by part, at the longest sequences; time is estimated. The files
that the configuration names need not be there. Exit code 2 also says that the memory of a GPU is too small.
"""


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    plan = add_command(
        commands, "plan", _run, "work out layout, memory and time of a run, without a GPU",
        "tepo-nemo plan experiment=paper_qwen2_5_7b",
        "tepo-nemo plan experiment=paper_qwen3_14b hardware=h100x32 algorithm=erpo",
        "tepo-nemo plan --fit experiment=paper_mistral_7b_instruct hardware.device_memory_gib=40",
        details=f"{_DETAILS}\n{OVERRIDES}",
    )  # fmt: skip
    plan.add_argument(
        "--fit", action="store_true", help="look for the smallest layout that fits, and plan that one"
    )
    add_config_arguments(plan)


def _run(arguments: argparse.Namespace) -> int:
    from tepo_nemo.config.files import missing_files
    from tepo_nemo.config.load import load_config
    from tepo_nemo.planning.fit import fit
    from tepo_nemo.planning.plan import check_fits, make_plan
    from tepo_nemo.planning.report import assumptions, launch_lines, sections
    from tepo_nemo.runs.tables import Table, print_tables

    config = load_config(arguments.overrides, arguments.config, files=False)
    plan, proposed = fit(config) if arguments.fit else (make_plan(config), [])
    print_tables([Table(*section) for section in sections(plan)])
    for line in assumptions(plan):
        print(f"assumed  {line}")
    for line in missing_files(config):
        print(f"missing  {line}")
    if arguments.fit:
        print(f"fits     {' '.join(proposed) or 'as it is'}")
    check_fits(plan)
    for line in launch_lines(plan, [*arguments.overrides, *proposed], arguments.config):
        print(f"start    {line}")
    return ExitCode.DONE
