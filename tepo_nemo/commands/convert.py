"""`tepo-nemo convert`"""

import argparse
import importlib.util
import signal
import sys
from pathlib import Path

from tepo_nemo.commands.parser import Subparsers, add_command, count
from tepo_nemo.errors import UserError
from tepo_nemo.launch.outcome import ExitCode

_DIRECTIONS = """what SOURCE is decides the direction:
  a folder of Hugging Face   with config.json, safetensors and tokenizer. OUTPUT is a NeMo checkpoint: a new
                             folder, or one file where its name ends in .nemo. A folder loads faster: of a
                             file every rank unpacks its own copy.
  a NeMo checkpoint          that this command made or that was trained from one, at any layout: a file, a
                             folder, or a run directory, of which the last checkpoint is taken. OUTPUT is a
                             folder that transformers and vLLM load, with the model's own config.json and
                             tokenizer.

families:
  Qwen2.5, Qwen3, Llama 3 (R1-Distill-Llama too), Mistral. Every weight is held against a list of names and
  shapes.

One process, no GPU. It takes the room of the model once on the disk (twice for a .nemo file) and a small part
of it in memory. OUTPUT gets its name when it is complete, with a manifest.json of hashes, which are checked
when it is converted back. A conversion that was interrupted starts again from the beginning.
"""


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    convert = add_command(
        commands, "convert", _run, "convert weights from Hugging Face to NeMo, or back",
        "tepo-nemo convert Qwen2.5-7B models/qwen2_5_7b",
        "tepo-nemo convert Qwen2.5-14B models/qwen2_5_14b",
        "tepo-nemo convert Qwen3-14B models/qwen3_14b",
        "tepo-nemo convert DeepSeek-R1-Distill-Llama-8B models/r1_distill_llama_8b",
        "tepo-nemo convert Mistral-7B-Instruct-v0.2 models/mistral_7b_instruct",
        "tepo-nemo train model=qwen2_5_7b model.restore_from_path=models/qwen2_5_7b ...",
        "tepo-nemo convert runs/tepo Qwen2.5-7B-TEPO",
        details=_DIRECTIONS,
    )  # fmt: skip
    convert.add_argument("source", type=Path, metavar="SOURCE", help="see below")
    convert.add_argument("output", type=Path, metavar="OUTPUT", help="a new folder, or a new .nemo file")
    convert.add_argument(
        "--sequence-length", type=count, metavar="N",
        help="longest sequence to train on (default: the model's own; Mistral v0.1 needs 4096, its window)",
    )  # fmt: skip
    convert.add_argument(
        "--pickle", action="store_true",
        help="read pytorch_model.bin where a folder has no safetensors; takes tensors alone from it",
    )  # fmt: skip


def _run(arguments: argparse.Namespace) -> int:
    for package in ("torch", "safetensors"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"convert: needs the package {package} (pip install {package})")
    from tepo_nemo.conversion.convert import convert
    from tepo_nemo.launch.evaluate import find_checkpoint
    from tepo_nemo.runs.directory import RunDirectory

    source = arguments.source
    if RunDirectory(source).config.is_file():
        source = find_checkpoint(source, "SOURCE").weights
    # A job that is told to end takes its unfinished folder away, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _Bar() as bar:
        done = convert(
            source,
            arguments.output,
            sequence_length=arguments.sequence_length,
            allow_pickle=arguments.pickle,
            watcher=bar,
        )
    size, speed = done.size / 1e9, done.size / 1e6 / done.seconds
    print(f"{arguments.output}  {done.family}, {size:.2f} GB in {done.seconds:.1f} s ({speed:.0f} MB/s)")
    return ExitCode.DONE


class _Bar:
    """Progress on stderr, where that is a terminal."""

    def __init__(self) -> None:
        import rich.console
        from rich import progress

        terminal = sys.stderr.isatty()
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            console=rich.console.Console(file=sys.stderr, force_terminal=terminal),
            transient=True,
            disable=not terminal,
        )

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, stage: str, size: int) -> None:
        self._task = self._progress.add_task(stage, total=size or None)

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)
