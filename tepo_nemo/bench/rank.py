"""One rank of a benchmark: `python -m tepo_nemo.bench.rank JOB`, with RANK and its like set."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tepo_nemo.bench.job import Job


def main() -> NoReturn:
    run_rank(lambda: _measure(Job.read(Path(sys.argv[1]))))


def run_rank(measure: Callable[[], None]) -> NoReturn:
    """A failed rank ends at once: others that wait for it must not be seen to fail before it."""
    try:
        measure()
        code = 0
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # unloading the stack takes seconds, and nothing is left to do


def _measure(job: Job) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    take_core()
    # Compile in this process: memory is measured in forks of it, which a pool of workers would not survive.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

    import torch

    from tepo_nemo import cpu

    cpu.install()
    torch.set_num_threads(1)
    from tepo_nemo.bench.measure import add_counts, add_peaks, measure_peaks, measure_times
    from tepo_nemo.bench.world import start_group

    say = console(job.console)
    peaks = [
        measure_peaks(cell, ranks, job.results.with_suffix(f".{index}"), say)
        for index, cell in enumerate(job.cells)
    ]
    group = start_group()
    tables = [measure_times(cell, group, say) for cell in job.cells]
    for table, cell, known in zip(tables, job.cells, peaks, strict=True):
        add_peaks(table, known)
        add_counts(table, cell, group, say)
    if os.environ["RANK"] == "0":
        job.results.write_text(json.dumps(tables))
    torch.distributed.barrier()  # no rank leaves while another one measures


def take_core() -> None:
    """Bind this rank to a core of its own; the figures are those of a CPU. Before torch is imported."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})


def console(variable: str) -> Callable[[str], None]:
    """Prints to the terminal, on the first rank; this process's own output is its log."""
    if os.environ["RANK"] != "0":
        return _silent
    descriptor = os.environ.get(variable)
    stream = sys.stdout if descriptor is None else open(int(descriptor), "w", encoding="utf-8", buffering=1)
    return lambda line: print(f"  {line}", file=stream, flush=True)


def _silent(line: str) -> None:
    pass


if __name__ == "__main__":
    main()
