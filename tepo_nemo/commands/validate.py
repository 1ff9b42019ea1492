"""`tepo-nemo validate`"""

import argparse

from tepo_nemo.commands.parser import OVERRIDES, Subparsers, add_command, add_config_arguments
from tepo_nemo.launch.outcome import ExitCode


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    validate = add_command(
        commands, "validate", _run, "check a configuration and print its layout",
        "tepo-nemo validate model.tensor_model_parallel_size=2 hardware.devices_per_node=4",
        details=OVERRIDES,
    )  # fmt: skip
    add_config_arguments(validate)


def _run(arguments: argparse.Namespace) -> int:
    from tepo_nemo.config.load import load_config
    from tepo_nemo.reward.grading import load_reward

    config = load_config(arguments.overrides, arguments.config)
    load_reward(config.data.reward_parts)
    print(f"valid\n{config.layout}")
    return ExitCode.DONE
