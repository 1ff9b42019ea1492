"""The `tepo-nemo` command."""

import argparse
import warnings
from collections.abc import Sequence

from tepo_nemo.commands import (
    bench,
    convert,
    doctor,
    evaluate,
    grade,
    plan,
    plot,
    prepare_data,
    study,
    submit,
    train,
    validate,
)
from tepo_nemo.commands.parser import EXIT_CODES, Parser
from tepo_nemo.errors import UserError
from tepo_nemo.launch.outcome import ExitCode, print_error

_COMMANDS = (
    train,
    validate,
    plan,
    submit,
    evaluate,
    plot,
    study,
    grade,
    bench,
    prepare_data,
    convert,
    doctor,
)  # in the order of the help


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, and prints a user's mistake as one line."""
    # torch says so wherever another package has brought pynvml; a command's stderr is for its user.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
    try:
        parsed = _parse(arguments)
        return int(parsed.command(parsed))
    except UserError as mistake:
        print_error(mistake)
        return ExitCode.MISTAKE
    except KeyboardInterrupt:
        print_error("interrupted")
        return ExitCode.FAILED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    # argparse does not take overrides on both sides of an option.
    unknown = [argument for argument in rest if argument.startswith("-") or "overrides" not in parsed]
    if unknown:
        parser.error(f"unknown argument {unknown[0]}")
    if rest:
        parsed.overrides += rest
    return parsed


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tepo-nemo",
        description="Train language models with TEPO and its family on NeMo-Aligner and Megatron.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
