"""One rank of the benchmark: `python -m tepo_nemo.bench.step.rank JOB`, with RANK and its like set."""

import json
import os
import sys
from pathlib import Path

from tepo_nemo.bench.rank import console, run_rank
from tepo_nemo.bench.step.job import Job


def _measure(job: Job) -> None:
    # On no core of its own: a run's ranks have none either, and ranks that wait for each other at every layer
    # wait longer where a core is shared with the threads that carry their messages.
    import torch

    from tepo_nemo import cpu

    cpu.install()
    torch.set_num_threads(1)
    from tepo_nemo.bench.step.measure import measure_case

    say = console(job.console)
    measured = [measure_case(case, job.folder, say) for case in job.cases]
    if os.environ["RANK"] == "0":
        job.results.write_text(json.dumps(measured))
    torch.distributed.barrier()  # no rank leaves while another one measures


if __name__ == "__main__":
    run_rank(lambda: _measure(Job.read(Path(sys.argv[1]))))
