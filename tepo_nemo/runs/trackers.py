"""Where metrics are shown beside `metrics.jsonl`. A tracker that fails or hangs costs the run nothing.

Each tracker has a thread of its own. What it raises is told once, and it is switched off; so is one that has
fallen behind by `BACKLOG` steps. At the end of a run it has `CLOSING_S` seconds to send what is left.
"""

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from tepo_nemo.errors import UserError
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.files import write_atomic
from tepo_nemo.runs.tensorboard import TensorBoard

BACKLOG = 100
CLOSING_S = 30.0
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}

Metrics = Mapping[str, float | int]


class Tracker(Protocol):
    """Takes the metrics of one step after the other; may raise anything."""

    def add(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class WeightsAndBiases:
    """Project, entity, mode and address are what W&B's own variables say (WANDB_PROJECT, WANDB_MODE, ...).

    A run that goes on is one run there too.
    """

    def __init__(self, directory: RunDirectory, config: Mapping[str, Any]) -> None:
        import wandb

        file = directory.tracked("wandb")
        name = file.read_text() if file.exists() else uuid.uuid4().hex
        self._run = wandb.init(
            dir=directory.path, name=directory.path.name, id=name, resume="allow", config=dict(config)
        )
        write_atomic(file, name)

    def add(self, step: int, metrics: Metrics) -> None:
        self._run.log(_finite(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Server and experiment are what MLflow's own variables say (MLFLOW_TRACKING_URI, ...)."""

    def __init__(self, directory: RunDirectory, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow, file = mlflow, directory.tracked("mlflow")
        if file.exists():
            mlflow.start_run(run_id=file.read_text())
            return
        run = mlflow.start_run(run_name=directory.path.name)
        write_atomic(file, run.info.run_id)
        parameters = [(key, str(value)[:500]) for key, value in config.items()]
        for start in range(0, len(parameters), 100):  # as many as the server takes at once
            mlflow.log_params(dict(parameters[start : start + 100]))

    def add(self, step: int, metrics: Metrics) -> None:
        self._mlflow.log_metrics(_finite(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError where the package of a tracker is not there."""
    for name in names:
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            raise UserError(
                f"trainer.trackers={list(names)}: {PACKAGES[name]} is not installed "
                f"(pip install {PACKAGES[name]}, or leave {name} out)"
            )


def openers(
    names: Sequence[str], directory: RunDirectory, config: Mapping[str, Any], after: int
) -> dict[str, Callable[[], Tracker]]:
    """What opens each tracker; called in its own thread.

    Args:
        config: of the run, as one level of keys.
        after: the run goes on after this step.
    """
    known: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(directory.tensorboard, after),
        "wandb": lambda: WeightsAndBiases(directory, config),
        "mlflow": lambda: MLflow(directory, config),
    }
    return {name: known[name] for name in names}


class Trackers:
    """All trackers of a run.

    Args:
        trackers: what opens each of them, by its name.
        report: tells a person a line.
    """

    def __init__(self, trackers: Mapping[str, Callable[[], Tracker]], report: Callable[[str], None]) -> None:
        self._all = [_Background(name, opener, report) for name, opener in trackers.items()]

    def add(self, step: int, metrics: Metrics) -> None:
        """Tell all of them; waits for none."""
        for tracker in self._all:
            tracker.add(step, metrics)

    def close(self) -> None:
        """Let them finish."""
        for tracker in self._all:
            tracker.close()


class _Background:
    """One tracker and its thread."""

    def __init__(self, name: str, opener: Callable[[], Tracker], report: Callable[[str], None]) -> None:
        self._name = name
        self._report = report
        self._off = False
        self._waiting: SimpleQueue[tuple[int, Metrics] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, args=(opener,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def add(self, step: int, metrics: Metrics) -> None:
        if self._off:
            return
        if self._waiting.qsize() >= BACKLOG:
            self._switch_off(f"it is {BACKLOG} steps behind")
            return
        self._waiting.put((step, dict(metrics)))

    def close(self) -> None:
        if self._off:
            return
        self._waiting.put(None)
        self._thread.join(CLOSING_S)
        if self._thread.is_alive():
            self._switch_off(f"it does not finish within {CLOSING_S:g} s")

    def _run(self, opener: Callable[[], Tracker]) -> None:
        try:
            tracker = opener()
            while (item := self._waiting.get()) is not None and not self._off:
                tracker.add(*item)
            tracker.close()
        except Exception as error:
            self._switch_off(f"{type(error).__name__}: {' '.join(str(error).split())}")

    def _switch_off(self, reason: str) -> None:
        if not self._off:
            self._off = True
            self._report(f"{self._name} is switched off, and the run goes on: {reason}")


def _finite(metrics: Metrics) -> dict[str, float | int]:
    return {key: value for key, value in metrics.items() if key != "step" and math.isfinite(value)}
