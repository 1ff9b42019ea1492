"""The `tepo-nemo` command. Each command imports what it needs when it runs: the light ones stay light."""

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from tepo_nemo.data.sources import SOURCES
from tepo_nemo.data.templates import TEMPLATES
from tepo_nemo.errors import UserError
from tepo_nemo.launch.outcome import ExitCode, print_error

_EXIT_CODES = """exit codes:
  0  done
  1  the run failed
  2  a mistake in configuration, arguments or files (one line on stderr says which)
  3  stopped by a signal or a time limit, with the state saved
"""
_OVERRIDES = """overrides:
  GROUP=PRESET   choose a preset of configs/GROUP: model=toy, algorithm=grpo, experiment=toy_cpu
  KEY=VALUE      set one key: rollout.prompts_per_step=64, seed=2
"""
_RESUME = """resume:
  The same command continues a study: finished cells are not run again, others start from their beginning.
  Exit code 1 says that cells have failed; the others have run, and the report is written.
"""
_EVALUATION = """benchmarks:
  data.evaluation lists them: name, path, samples, temperature, k; data=math has the paper's seven.
  A benchmark's problems that also occur in data.train are found, and scores are given with and without them.

output:
  problems.jsonl  one line a problem: its answers with their grading
  report.json     all scores: avg@k, pass@k, majority@k, both averages, intervals, counts
  table.txt       the same in the paper's layout, beside the paper's rows
  The same command again goes on where an evaluation was interrupted.
"""
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


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where argparse prints its usage first."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


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


def _train(arguments: argparse.Namespace) -> int:
    from tepo_nemo.config.load import load_config
    from tepo_nemo.launch.run import start_local_run

    return start_local_run(load_config(arguments.overrides, arguments.config))


def _eval(arguments: argparse.Namespace) -> int:
    from tepo_nemo.launch.evaluate import evaluation_config, start_local_evaluation

    return start_local_evaluation(
        evaluation_config(arguments.overrides, arguments.config, arguments.checkpoint, arguments.benchmarks)
    )


def _validate(arguments: argparse.Namespace) -> int:
    from tepo_nemo.config.load import load_config
    from tepo_nemo.reward.grading import load_reward

    config = load_config(arguments.overrides, arguments.config)
    load_reward(config.data.reward_parts)
    print(f"valid\n{config.layout}")
    return ExitCode.DONE


def _study(arguments: argparse.Namespace) -> int:
    from tepo_nemo.launch.local import describe_failure
    from tepo_nemo.launch.pool import run_jobs
    from tepo_nemo.launch.run import check_local_run
    from tepo_nemo.study.command import run_study
    from tepo_nemo.study.run import Launcher

    train = [sys.executable, "-m", "tepo_nemo.cli", "train", "--config"]
    launcher = Launcher(check_local_run, train, run_jobs, describe_failure)
    outcome = run_study(
        arguments.study, arguments.output, launcher, only=arguments.only, run=not arguments.report_only
    )
    if outcome.interrupted:
        print_error("stopped; the same command runs the cells that are left")
        return ExitCode.STOPPED
    if outcome.failed:
        print_error(f"failed: {'; '.join(cell.name for cell in outcome.failed)} (see above)")
        return ExitCode.FAILED
    return ExitCode.DONE


def _plot(arguments: argparse.Namespace) -> int:
    from tepo_nemo.runs.plots import plot_run

    for path in plot_run(arguments.run):
        print(path)
    return ExitCode.DONE


def _grade(arguments: argparse.Namespace) -> int:
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


def _bench_vocab_parallel(arguments: argparse.Namespace) -> int:
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


def _bench_step(arguments: argparse.Namespace) -> int:
    from tepo_nemo.bench.step.command import QUICK, Options, bench
    from tepo_nemo.launch.local import CONSOLE_VARIABLE, run_ranks

    chosen = {"models": arguments.model and tuple(arguments.model), "rounds": arguments.rounds}
    given = {name: value for name, value in chosen.items() if value is not None}
    options = Options(arguments.output, **(QUICK if arguments.quick else {}) | given)
    return bench(options, run_ranks, CONSOLE_VARIABLE)


def _prepare_toy(arguments: argparse.Namespace) -> int:
    from tepo_nemo.data.toy import TOY_CHARACTERS, write_toy_data

    return _prepare(arguments, "toy", write_toy_data, TOY_CHARACTERS)


def _prepare_chain(arguments: argparse.Namespace) -> int:
    from tepo_nemo.data.chain import CHAIN_CHARACTERS, write_chain_data

    return _prepare(arguments, "chain", write_chain_data, CHAIN_CHARACTERS)


def _prepare(
    arguments: argparse.Namespace, task: str, write_data: Callable[..., None], characters: str
) -> int:
    if importlib.util.find_spec("transformers") is None:
        raise UserError(
            f"prepare-data {task}: needs the package transformers for its tokenizer "
            "(pip install transformers)"
        )
    from tepo_nemo.data.char_tokenizer import make_char_tokenizer

    write_data(arguments.output, seed=arguments.seed)
    make_char_tokenizer(arguments.output / "tokenizer", characters)
    print(arguments.output)
    return ExitCode.DONE


def _prepare_math(arguments: argparse.Namespace) -> int:
    from tepo_nemo.data.prepare import LengthLimit, prepare

    if arguments.tokenizer is not None and arguments.max_prompt_length is None:
        raise UserError(f"--tokenizer={arguments.tokenizer}: has no use without --max-prompt-length")
    limit = None
    if arguments.max_prompt_length is not None:
        limit = LengthLimit(arguments.max_prompt_length, arguments.tokenizer)
    lines = prepare(
        arguments.source,
        arguments.input,
        arguments.output,
        template_name=arguments.template,
        limit=limit,
        skip_malformed=arguments.skip_malformed,
    )
    print("\n".join(lines))
    return ExitCode.DONE


def _prepare_overlap(arguments: argparse.Namespace) -> int:
    from tepo_nemo.data.overlap import find_overlap
    from tepo_nemo.data.prompts import load_prompts
    from tepo_nemo.runs.files import to_json

    problems, others = (load_prompts(path) for path in (arguments.problems, arguments.others))
    overlaps = find_overlap(problems, others)
    for overlap in overlaps:
        print(to_json(asdict(overlap)))
    print(f"overlap {len(overlaps)} / {len(problems)}")
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tepo-nemo",
        description="Train language models with TEPO and its family on NeMo-Aligner and Megatron.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = _add(
        commands, "train", _train, "train a model on the ranks of this machine",
        "tepo-nemo train experiment=toy_cpu output=runs/toy",
        "tepo-nemo train --config runs/toy/config.yaml output=runs/again seed=2",
        details=_OVERRIDES,
    )  # fmt: skip
    validate = _add(
        commands, "validate", _validate, "check a configuration and print its layout",
        "tepo-nemo validate model.tensor_model_parallel_size=2 hardware.devices_per_node=4",
        details=_OVERRIDES,
    )  # fmt: skip
    evaluate = _add(
        commands, "eval", _eval, "evaluate a checkpoint on benchmarks, or go on where one was interrupted",
        "tepo-nemo eval --checkpoint runs/toy",
        "tepo-nemo eval --checkpoint runs/toy/checkpoints/step_000010.nemo --benchmarks toy output=scores/10",
        "tepo-nemo eval --checkpoint MODEL.nemo --benchmarks amc,minerva data=math output=scores/model",
        details=_OVERRIDES + _EVALUATION,
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
    for command in (train, validate, evaluate):
        command.add_argument(
            "--config", type=Path, metavar="FILE", help="start from a saved config.yaml, not from presets"
        )
        command.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="see below")

    plot = _add(commands, "plot", _plot, "draw the pictures of a run", "tepo-nemo plot runs/toy")
    plot.add_argument("run", type=Path, metavar="RUN", help="a run directory")

    study = _add(
        commands, "study", _study, "run experiments x seeds and compare them in a report",
        "tepo-nemo study configs/study/paper_mini.yaml --output runs/paper_mini",
        "tepo-nemo study paper_mini --output runs/paper_mini --only TEPO GRPO/DAPO",
        details=_RESUME,
    )  # fmt: skip
    study.add_argument(
        "study", type=Path, metavar="STUDY", help="a study file, or the name of one in configs/study"
    )
    study.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="a new folder, or one to continue"
    )
    study.add_argument("--only", nargs="+", metavar="LABEL", help="run the cells of these experiments alone")
    study.add_argument("--report-only", action="store_true", help="run nothing: report what is finished")

    grade = _add(
        commands, "grade", _grade, "audit the grader of mathematical answers on a file of pairs",
        "tepo-nemo grade pairs.jsonl",
        "tepo-nemo grade --time-limit 3 pairs.jsonl",
        details=_GRADED_ROWS,
    )  # fmt: skip
    grade.add_argument("file", type=Path, metavar="FILE", help="JSON lines, see below")
    grade.add_argument("--workers", type=_positive(int), metavar="N", help="processes (default: 8)")
    grade.add_argument(
        "--time-limit", type=_positive(float), metavar="S", help="seconds for one response (default: 10)"
    )

    bench = commands.add_parser("bench", help="measure ours beside other implementations", epilog=_EXIT_CODES,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    benchmarks = bench.add_subparsers(metavar="BENCHMARK", required=True)
    vocab = _add(
        benchmarks, "vocab-parallel", _bench_vocab_parallel,
        "log-prob and entropy of split vocabularies: time, memory and errors beside other implementations",
        "tepo-nemo bench vocab-parallel --output bench",
        "tepo-nemo bench vocab-parallel --quick --output bench",
    )  # fmt: skip
    vocab.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    vocab.add_argument("--tokens", type=int, metavar="N", help="of the main table (default: 1024)")
    vocab.add_argument(
        "--vocab", type=int, nargs="+", metavar="V", help="vocabulary sizes (default: 152064 151936)"
    )
    vocab.add_argument("--tp", type=int, nargs="+", metavar="T", help="tensor-parallel sizes (default: 2 1)")
    vocab.add_argument("--pairs", type=int, metavar="N", help="timed pairs of a row, at most (default: 15)")
    vocab.add_argument("--quick", action="store_true", help="small sizes: a look at the command itself")

    step = _add(
        benchmarks, "step", _bench_step,
        "whole training steps: beside NeMo-Aligner's REINFORCE, and what makes them fast",
        "tepo-nemo bench step --output bench",
        "tepo-nemo bench step --quick --output bench",
    )  # fmt: skip
    step.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    step.add_argument("--model", nargs="+", metavar="NAME", help="models (default: toy wide)")
    step.add_argument("--rounds", type=int, metavar="N", help="timed steps of a row (default: 2)")
    step.add_argument("--quick", action="store_true", help="few responses: a look at the command itself")

    prepare = commands.add_parser("prepare-data", help="make a prompt set", epilog=_EXIT_CODES,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    sets = prepare.add_subparsers(metavar="SET", required=True)
    toy = _add(
        sets, "toy", _prepare_toy, "sums of two numbers and a tokenizer for them",
        "tepo-nemo prepare-data toy --output toy",
    )  # fmt: skip
    chain = _add(
        sets, "chain", _prepare_chain, "sums of several digits, answered by running totals, and a tokenizer",
        "tepo-nemo prepare-data chain --output chain",
    )  # fmt: skip
    for task in (toy, chain):
        task.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
        task.add_argument("--seed", type=int, default=1, help="which problems are taken (default: 1)")

    math = _add(
        sets, "math", _prepare_math, "a training set or a benchmark of mathematics, from its public file",
        "tepo-nemo prepare-data math dapo_math_17k --input dapo-math-17k.parquet --output dapo.jsonl "
        "--template qwen2_5",
        "tepo-nemo prepare-data math amc --input aimo-validation-amc.jsonl --output amc.jsonl "
        "--template mistral_instruct",
        "tepo-nemo prepare-data math jsonl --input mine.jsonl --output set.jsonl --template qwen3 "
        "--tokenizer Qwen/Qwen3-14B --max-prompt-length 2048",
        details=_sources_and_templates(),
    )  # fmt: skip
    math.add_argument("source", choices=SOURCES, metavar="SOURCE", help="see below")
    math.add_argument(
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="parquet, JSON lines or a JSON array; .gz too",
    )
    math.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="a new file; a report is written beside it"
    )
    math.add_argument(
        "--template", choices=TEMPLATES, required=True, metavar="NAME", help="what the model reads, see below"
    )
    math.add_argument(
        "--max-prompt-length", type=_count, metavar="N", help="longest prompt that is kept, template included"
    )
    math.add_argument(
        "--tokenizer", metavar="NAME", help="a folder or a name on the hub: count its tokens, not characters"
    )
    math.add_argument(
        "--skip-malformed", action="store_true", help="leave malformed rows out and list them (default: stop)"
    )

    overlap = _add(
        sets, "overlap", _prepare_overlap, "list the problems of a prompt set that also occur in another",
        "tepo-nemo prepare-data overlap amc.jsonl dapo.jsonl",
    )  # fmt: skip
    overlap.add_argument("problems", type=Path, metavar="FILE", help="a prompt set, such as a benchmark")
    overlap.add_argument("others", type=Path, metavar="OTHER", help="another one, such as a training set")
    return parser


def _sources_and_templates() -> str:
    sources = "".join(f"  {source.name:14} {source.about}\n" for source in SOURCES.values())
    return f"sources:\n{sources}\ntemplates:\n  {', '.join(TEMPLATES)}\n"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def _positive(kind: type) -> Callable[[str], float]:
    """An argument that is a number above 0."""

    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    read.__name__ = f"positive {kind.__name__}"  # argparse shows it
    return read


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    command: Callable[[argparse.Namespace], int],
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
        epilog="\n".join(filter(None, (details, shown, _EXIT_CODES))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
