"""`tepo-nemo bench vocab-parallel`: log-prob and entropy from logits and from hidden states."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_nemo.bench.job import Cell, Job
from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import require_new_folder, write_atomic

StartRanks = Callable[..., int]
"""`launch.local.run_ranks`."""

_MOST_LAYER_TOKENS = 512


@dataclass(frozen=True)
class Options:
    """What to measure. The first of `tensor_parallel` with the first of `vocab_sizes` is the main table."""

    output: Path
    tokens: int = 1024
    vocab_sizes: tuple[int, ...] = (152_064, 151_936)
    tensor_parallel: tuple[int, ...] = (2, 1)
    pairs: int = 15
    row_seconds: float = 6.0  # a slower row of the main table has fewer pairs
    hidden_size: int = 256

    def __post_init__(self) -> None:
        """Raises UserError."""
        for name, value, least in (("--tokens", self.tokens, 32), ("--pairs", self.pairs, 3)):
            if value < least:
                raise UserError(f"{name} {value}: must be at least {least}")
        cores = len(os.sched_getaffinity(0))
        for ranks in self.tensor_parallel:
            if not 1 <= ranks <= cores:
                raise UserError(
                    f"--tp {ranks}: must be from 1 to {cores}, the number of cores (each rank gets its own)"
                )
            for size in self.vocab_sizes:
                if size < 1 or size % ranks != 0:
                    raise UserError(f"--vocab {size}: must be positive and divisible by --tp {ranks}")
        require_new_folder(self.output)

    def cells(self, ranks: int) -> tuple[Cell, ...]:
        """The tables of one tensor-parallel size; those beside the main one get fewer tokens and pairs."""
        main = ranks == self.tensor_parallel[0]
        quarter, layer = self.tokens // 4, min(self.tokens // 2, _MOST_LAYER_TOKENS)
        of_logits = [
            Cell(size, self.tokens, self.pairs, self.row_seconds, memory_tokens=(quarter, self.tokens))
            if main and index == 0
            else Cell(
                size,
                quarter,
                self.pairs,
                self.row_seconds / 8,
                memory_tokens=(),
            )
            for index, size in enumerate(self.vocab_sizes)
        ]
        sizes = (layer, layer // 2) if main else (layer // 2,)
        of_layer = [
            Cell(
                self.vocab_sizes[0],
                tokens,
                self.pairs,
                self.row_seconds / 4,
                memory_tokens=(layer // 2, layer) if main and tokens == layer else (),
                hidden_size=self.hidden_size,
            )
            for tokens in sizes
        ]
        return (*of_logits, *of_layer)


QUICK = {"tokens": 64, "vocab_sizes": (1000,), "tensor_parallel": (2,), "pairs": 3, "hidden_size": 16}
"""Options for a look at the command itself; its times mean nothing."""


def bench(options: Options, start_ranks: StartRanks, console: str) -> int:
    """Measure on ranks of this machine and write vocab_parallel.{json,md,png}; returns the exit code.

    Args:
        start_ranks: starts a command as ranks 0 to n - 1 and waits for them.
        console: the environment variable that tells rank 0 the descriptor of the terminal.
    """
    logs = options.output / "logs"
    logs.mkdir(parents=True)
    cells: list[dict[str, Any]] = []
    for ranks in options.tensor_parallel:
        print(f"tensor-parallel size {ranks}", flush=True)
        folder = logs / f"tp{ranks}"
        folder.mkdir()
        job = Job(options.cells(ranks), folder / "results.json", console)
        job.write(folder / "job.json")
        code = start_ranks(
            [sys.executable, "-m", "tepo_nemo.bench.rank", str(folder / "job.json")],
            ranks=ranks,
            logs=folder,
            environment={"OMP_NUM_THREADS": "1"},
        )
        if code != 0:
            return code
        cells += json.loads(job.results.read_text())
    _report(options, cells)
    return 0


def _report(options: Options, cells: list[dict[str, Any]]) -> None:
    from tepo_nemo.bench.bounds import bounds_of
    from tepo_nemo.bench.machine import describe_machine, versions
    from tepo_nemo.bench.picture import draw
    from tepo_nemo.bench.report import all_tables, main_tables
    from tepo_nemo.runs.tables import print_tables, to_markdown

    results = {
        "machine": describe_machine(),
        "versions": versions(),
        "cells": cells,
        "bounds": bounds_of(cells),
    }
    write_atomic(options.output / "vocab_parallel.json", json.dumps(results, indent=1) + "\n")
    document = to_markdown("tepo-nemo bench vocab-parallel", all_tables(results))
    write_atomic(options.output / "vocab_parallel.md", document)
    draw(cells[0], options.output / "vocab_parallel.png")
    print_tables(main_tables(results))
    print(options.output)
