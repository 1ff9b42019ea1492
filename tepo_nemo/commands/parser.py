"""What the commands share: how a subcommand is added, and the kinds of its arguments."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

from tepo_nemo.errors import UserError

EXIT_CODES = """exit codes:
  0  done
  1  the run failed
  2  a mistake in configuration, arguments or files (one line on stderr says which)
  3  stopped by a signal or a time limit, with the state saved
"""
OVERRIDES = """overrides:
  GROUP=PRESET   choose a preset of configs/GROUP: model=toy, algorithm=grpo, experiment=toy_cpu
  KEY=VALUE      set one key: rollout.prompts_per_step=64, seed=2
"""

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What `add_subparsers` gives; argparse has no public name for it."""

Command: TypeAlias = Callable[[argparse.Namespace], int]
"""Takes the parsed arguments, returns the exit code."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where argparse prints its usage first."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def add_command(
    commands: Subparsers,
    name: str,
    command: Command,
    summary: str,
    *examples: str,
    details: str = "",
) -> argparse.ArgumentParser:
    """A subcommand whose help ends with examples and exit codes."""
    shown = "examples:\n" + "".join(f"  {example}\n" for example in examples)
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="\n".join(filter(None, (details, shown, EXIT_CODES))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command)
    return parser


def add_command_group(commands: Subparsers, name: str, summary: str, metavar: str) -> Subparsers:
    """A command that only holds others, such as `bench`."""
    parser = commands.add_parser(
        name, help=summary, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return parser.add_subparsers(metavar=metavar, required=True)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """`--config` and overrides, from which `load_config` makes a configuration."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="start from a saved config.yaml, not from presets"
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="see below")


def add_new_folder(parser: argparse.ArgumentParser) -> None:
    """`--output`, a folder that the command makes."""
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")


def count(text: str) -> int:
    """An argument that is a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def positive(kind: type) -> Callable[[str], float]:
    """An argument that is a number above 0."""

    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    read.__name__ = f"positive {kind.__name__}"  # argparse shows it
    return read
