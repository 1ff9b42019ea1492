"""`tepo-nemo prepare-data`"""

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tepo_nemo.commands.parser import Subparsers, add_command, add_command_group, add_new_folder, count
from tepo_nemo.data.sources import SOURCES
from tepo_nemo.data.templates import TEMPLATES
from tepo_nemo.errors import UserError
from tepo_nemo.launch.outcome import ExitCode


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    sets = add_command_group(commands, "prepare-data", "make a prompt set", "SET")
    toy = add_command(
        sets, "toy", _toy, "sums of two numbers and a tokenizer for them",
        "tepo-nemo prepare-data toy --output toy",
    )  # fmt: skip
    chain = add_command(
        sets, "chain", _chain, "sums of several digits, answered by running totals, and a tokenizer",
        "tepo-nemo prepare-data chain --output chain",
    )  # fmt: skip
    for task in (toy, chain):
        add_new_folder(task)
        task.add_argument("--seed", type=int, default=1, help="which problems are taken (default: 1)")

    math = add_command(
        sets, "math", _math, "a training set or a benchmark of mathematics, from its public file",
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
        "--max-prompt-length", type=count, metavar="N", help="longest prompt that is kept, template included"
    )
    math.add_argument(
        "--tokenizer", metavar="NAME", help="a folder or a name on the hub: count its tokens, not characters"
    )
    math.add_argument(
        "--skip-malformed", action="store_true", help="leave malformed rows out and list them (default: stop)"
    )

    overlap = add_command(
        sets, "overlap", _overlap, "list the problems of a prompt set that also occur in another",
        "tepo-nemo prepare-data overlap amc.jsonl dapo.jsonl",
    )  # fmt: skip
    overlap.add_argument("problems", type=Path, metavar="FILE", help="a prompt set, such as a benchmark")
    overlap.add_argument("others", type=Path, metavar="OTHER", help="another one, such as a training set")


def _toy(arguments: argparse.Namespace) -> int:
    from tepo_nemo.data.toy import TOY_CHARACTERS, write_toy_data

    return _prepare(arguments, "toy", write_toy_data, TOY_CHARACTERS)


def _chain(arguments: argparse.Namespace) -> int:
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


def _math(arguments: argparse.Namespace) -> int:
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


def _overlap(arguments: argparse.Namespace) -> int:
    from tepo_nemo.data.overlap import find_overlap
    from tepo_nemo.data.prompts import load_prompts
    from tepo_nemo.runs.files import to_json

    problems, others = (load_prompts(path) for path in (arguments.problems, arguments.others))
    overlaps = find_overlap(problems, others)
    for overlap in overlaps:
        print(to_json(asdict(overlap)))
    print(f"overlap {len(overlaps)} / {len(problems)}")
    return ExitCode.DONE


def _sources_and_templates() -> str:
    sources = "".join(f"  {source.name:14} {source.about}\n" for source in SOURCES.values())
    return f"sources:\n{sources}\ntemplates:\n  {', '.join(TEMPLATES)}\n"
