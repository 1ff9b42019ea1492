"""One rank of a run. The local launcher, srun and torchrun all end up here."""

import argparse
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

from tepo_nemo.config.load import load_config
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.launch.evaluate import evaluation_config, evaluation_directory
from tepo_nemo.launch.local import CONSOLE_VARIABLE
from tepo_nemo.launch.outcome import ExitCode, print_error
from tepo_nemo.launch.preflight import check_run
from tepo_nemo.launch.run import finished_line, is_finished, open_run
from tepo_nemo.launch.scheduler import set_rank_variables
from tepo_nemo.runs.stop import StopFlag, Stopped

_HEAD_START_S = 5.0  # for rank 0 to report a mistake that all ranks have found


def main() -> NoReturn:
    """`python -m tepo_nemo.launch.rank --config FILE`: a rank of the local launcher; the run is checked."""
    parser = argparse.ArgumentParser(prog="tepo_nemo.launch.rank")
    parser.add_argument("--config", type=Path, required=True, help="the resolved configuration of the run")
    parser.add_argument("--evaluate", action="store_true", help="evaluate the checkpoint, do not train it")
    arguments = parser.parse_args()
    if arguments.evaluate:
        end_with(lambda: evaluate_as_rank(load_config(config_file=arguments.config)))
    stop = _listening()
    end_with(lambda: run_rank(load_config(config_file=arguments.config), stop))


def train_from_overrides(overrides: Sequence[str]) -> NoReturn:
    """A rank that srun or torchrun has started, or the only one; checks the run as `tepo-nemo train` does."""

    stop = _listening()

    def train(rank: int) -> None:
        config = load_config(overrides)
        _check_world(config)
        check_run(config)
        if is_finished(config):  # as every rank finds for itself
            if rank == 0:
                print(finished_line(config))
        elif rank == 0:
            with open_run(config):
                run_rank(config, stop)
        else:
            run_rank(config, stop)

    _end_as_rank(train, stop)


def evaluate_from_overrides(overrides: Sequence[str]) -> NoReturn:
    """The same for `tepo-nemo eval` of `model.restore_from_path`."""

    def evaluate(rank: int) -> None:
        config = evaluation_config(overrides)
        _check_world(config)
        if rank == 0:
            with evaluation_directory(config):
                evaluate_as_rank(config)
        else:
            evaluate_as_rank(config)

    _end_as_rank(evaluate, StopFlag())


def _end_as_rank(body: Callable[[int], None], stop: StopFlag) -> NoReturn:
    """Run `body` as the rank that srun or torchrun has made of this process, and end it."""
    set_rank_variables(os.environ)
    rank = int(os.environ["RANK"])
    end_with(lambda: body(rank), report=print_error if rank == 0 else partial(_print_error_late, stop))


def _listening() -> StopFlag:
    """From the first moment on: to load what training needs takes a while, in which a signal may come."""
    stop = StopFlag()
    stop.listen()
    return stop


def run_rank(config: Config, stop: StopFlag) -> None:
    """Train as the rank that RANK, WORLD_SIZE and LOCAL_RANK name, in a run directory that is made."""
    stop.limit(config.trainer.max_seconds)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the stacks, into this rank's log
    prepare_devices(config)
    from tepo_nemo.nemo.run import train

    train(config, console=_console(), stop=stop)


def evaluate_as_rank(config: Config) -> None:
    """Evaluate as that rank, in an evaluation directory that is made."""
    # What is answered is written down already: the next evaluation goes on from there.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(ExitCode.STOPPED))
    prepare_devices(config)
    from tepo_nemo.nemo.evaluate import evaluate_checkpoint

    evaluate_checkpoint(config, console=_console())


def prepare_devices(config: Config) -> None:
    """Put the CPU stand-ins in place, or check that this rank has a GPU (UserError)."""
    if config.hardware.accelerator == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the stand-ins have no effect where a GPU is seen
        from tepo_nemo import cpu

        cpu.install()
        return
    import torch

    if torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
        raise UserError(
            f"hardware.accelerator=gpu: rank {os.environ['RANK']} finds {torch.cuda.device_count()} CUDA "
            "devices on its "
            f"machine, hardware.devices_per_node={config.hardware.devices_per_node} (lower that, or set "
            "hardware=cpu)"
        )


def _check_world(config: Config) -> None:
    started, configured = int(os.environ["WORLD_SIZE"]), config.layout.world
    if started != configured:
        raise UserError(
            f"hardware.nodes={config.hardware.nodes} x "
            f"hardware.devices_per_node={config.hardware.devices_per_node}: "
            f"{configured} ranks are configured, {started} were started (start {configured}, or change the "
            "keys)"
        )


def _console() -> TextIO:
    """Where a person reads: the terminal of the launcher, or this process's own output."""
    descriptor = os.environ.get(CONSOLE_VARIABLE)
    return sys.stdout if descriptor is None else open(int(descriptor), "w", encoding="utf-8", buffering=1)


def end_with(body: Callable[[], None], report: Callable[[object], None] = print_error) -> NoReturn:
    """Run `body` and end the process.

    A failed rank ends at once, without the clean-up of libraries: it could wait for other ranks, and they
    must not be seen to fail before the one that pulled them down.
    """
    try:
        body()
    except Stopped:
        sys.exit(ExitCode.STOPPED)
    except UserError as mistake:
        report(mistake)
        code = ExitCode.MISTAKE
    except Exception:
        traceback.print_exc()
        code = ExitCode.FAILED
    else:
        sys.exit(ExitCode.DONE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _print_error_late(stop: StopFlag, mistake: object) -> None:
    """For the other ranks under srun or torchrun: rank 0 reports what it finds too, and they are ended."""
    deadline = time.monotonic() + _HEAD_START_S
    while time.monotonic() < deadline:
        if stop.value:  # they are being ended, before or after they have found it themselves
            return
        time.sleep(0.05)
    print_error(f"rank {os.environ['RANK']}: {mistake}")


if __name__ == "__main__":
    main()
