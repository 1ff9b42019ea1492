"""`tepo-nemo bench`"""

import argparse

from tepo_nemo.commands.parser import Subparsers, add_command, add_command_group, add_new_folder


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    benchmarks = add_command_group(
        commands, "bench", "measure ours beside other implementations", "BENCHMARK"
    )
    vocab = add_command(
        benchmarks, "vocab-parallel", _vocab_parallel,
        "log-prob and entropy of split vocabularies: time, memory and errors beside other implementations",
        "tepo-nemo bench vocab-parallel --output bench",
        "tepo-nemo bench vocab-parallel --quick --output bench",
    )  # fmt: skip
    add_new_folder(vocab)
    vocab.add_argument("--tokens", type=int, metavar="N", help="of the main table (default: 1024)")
    vocab.add_argument(
        "--vocab", type=int, nargs="+", metavar="V", help="vocabulary sizes (default: 152064 151936)"
    )
    vocab.add_argument("--tp", type=int, nargs="+", metavar="T", help="tensor-parallel sizes (default: 2 1)")
    vocab.add_argument("--pairs", type=int, metavar="N", help="timed pairs of a row, at most (default: 15)")
    vocab.add_argument("--quick", action="store_true", help="small sizes: a look at the command itself")

    step = add_command(
        benchmarks, "step", _step,
        "whole training steps: beside NeMo-Aligner's REINFORCE, and what makes them fast",
        "tepo-nemo bench step --output bench",
        "tepo-nemo bench step --quick --output bench",
    )  # fmt: skip
    add_new_folder(step)
    step.add_argument("--model", nargs="+", metavar="NAME", help="models (default: toy wide)")
    step.add_argument("--rounds", type=int, metavar="N", help="timed steps of a row (default: 2)")
    step.add_argument("--quick", action="store_true", help="few responses: a look at the command itself")


def _vocab_parallel(arguments: argparse.Namespace) -> int:
    from tepo_nemo.bench.vocab_parallel import QUICK, Options, bench
    from tepo_nemo.launch.local import CONSOLE_VARIABLE, run_ranks

    chosen = {
        "tokens": arguments.tokens,
        "vocab_sizes": arguments.vocab and tuple(arguments.vocab),
        "tensor_parallel": arguments.tp and tuple(arguments.tp),
        "pairs": arguments.pairs,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    options = Options(arguments.output, **(QUICK if arguments.quick else {}) | given)
    return bench(options, run_ranks, CONSOLE_VARIABLE)


def _step(arguments: argparse.Namespace) -> int:
    from tepo_nemo.bench.step.command import QUICK, Options, bench
    from tepo_nemo.launch.local import CONSOLE_VARIABLE, run_ranks

    chosen = {"models": arguments.model and tuple(arguments.model), "rounds": arguments.rounds}
    given = {name: value for name, value in chosen.items() if value is not None}
    options = Options(arguments.output, **(QUICK if arguments.quick else {}) | given)
    return bench(options, run_ranks, CONSOLE_VARIABLE)
