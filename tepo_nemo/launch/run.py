"""Starting a run on this machine, or going on with one."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tepo_nemo.config.load import dump_config
from tepo_nemo.config.resume import check_same_run, read_saved
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.launch.local import run_ranks
from tepo_nemo.launch.outcome import ExitCode
from tepo_nemo.launch.preflight import check_run
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.summary import read_summary


def start_local_run(config: Config) -> int:
    """Train on the ranks of this machine until they end; returns the exit code.

    Where the run directory is that of the same run, it goes on.

    Raises UserError on a mistake that shows before the first step; no new run directory is left then.
    """
    check_local_run(config)
    if is_finished(config):
        print(finished_line(config))
        return ExitCode.DONE
    with open_run(config) as run:
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


def is_finished(config: Config) -> bool:
    """Whether the run directory holds this run with all its steps.

    Raises UserError where it holds a run of another configuration.
    """
    run = RunDirectory(config.output)
    if not run.exists:
        return False
    check_same_run(config, read_saved(run.config), run.path)
    if not run.summary.is_file():
        return False
    summary = read_summary(run.summary)
    return summary["status"] == "done" and summary["steps"] >= config.trainer.max_steps


def finished_line(config: Config) -> str:
    """What a person is told of a finished run."""
    steps = read_summary(RunDirectory(config.output).summary)["steps"]
    return (
        f"{config.output}: the run is finished, with {steps} steps (for more, set trainer.max_steps; for "
        "another run, choose another output)"
    )


@contextmanager
def open_run(config: Config) -> Iterator[RunDirectory]:
    """The directory of a run that goes on, or of a new one.

    A new one is taken away again where a mistake ends the run before its first step. Raises UserError where
    there is something else.
    """
    if RunDirectory(config.output).exists:
        check_same_run(config, read_saved(RunDirectory(config.output).config), config.output)
        yield RunDirectory.reopen(config.output, dump_config(config))
        return
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
