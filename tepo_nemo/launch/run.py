"""Starting a run on this machine."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tepo_nemo.config.load import dump_config
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.launch.local import run_ranks
from tepo_nemo.launch.preflight import check_run
from tepo_nemo.runs.directory import RunDirectory


def start_local_run(config: Config) -> int:
    """Train on the ranks of this machine until they end; returns the exit code.

    Raises UserError on a mistake that shows before the first step; no run directory is left then.
    """
    check_local_run(config)
    with new_run(config) as run:
        return run_ranks(
            [sys.executable, "-m", "tepo_nemo.launch.rank", "--config", str(run.config)],
            ranks=config.layout.world,
            logs=run.logs,
            environment={"OMP_NUM_THREADS": "1"} if config.hardware.accelerator == "cpu" else {},
        )


def check_local_run(config: Config) -> None:
    """What can be found wrong before the ranks of this machine start. Raises UserError."""
    if config.hardware.nodes > 1:
        raise UserError(
            f"hardware.nodes={config.hardware.nodes}: this command starts the ranks of one machine "
            "(start examples/train_tepo.py with srun or torchrun, or set hardware.nodes=1)"
        )
    check_run(config)


@contextmanager
def new_run(config: Config) -> Iterator[RunDirectory]:
    """The directory of a new run; taken away again where a mistake ends the run before its first step."""
    existed = config.output.exists()
    run = RunDirectory.create(config.output, dump_config(config))
    try:
        yield run
    except UserError:
        if not run.metrics.exists() or run.metrics.stat().st_size == 0:
            _empty(run)
            if not existed:
                run.path.rmdir()
        raise


def _empty(run: RunDirectory) -> None:
    """It was empty when the run began, so everything in it is the run's own."""
    for path in run.path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
