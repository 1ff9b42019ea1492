"""`tepo-nemo train`"""

import argparse

from tepo_nemo.commands.parser import OVERRIDES, Subparsers, add_command, add_config_arguments


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    train = add_command(
        commands, "train", _run, "train a model on the ranks of this machine",
        "tepo-nemo train experiment=toy_cpu output=runs/toy",
        "tepo-nemo train --config runs/toy/config.yaml output=runs/again seed=2",
        details=OVERRIDES,
    )  # fmt: skip
    add_config_arguments(train)


def _run(arguments: argparse.Namespace) -> int:
    from tepo_nemo.config.load import load_config
    from tepo_nemo.launch.run import start_local_run

    return start_local_run(load_config(arguments.overrides, arguments.config))
