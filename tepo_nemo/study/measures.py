"""What one run is measured by: a few numbers from its metrics and its summary."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import EVALUATION_PREFIX
from tepo_nemo.runs.plots import Columns, read_columns
from tepo_nemo.runs.summary import read_summary


class Value(NamedTuple):
    """A number, NaN where the run has none. A censored one is a lower bound of the number."""

    number: float
    censored: bool = False


@dataclass(frozen=True)
class Result:
    """What a finished run has left."""

    columns: Columns
    before: dict[str, float]
    """Benchmark -> avg@k before training, empty where it was not evaluated."""
    after: dict[str, float]
    """And after it."""
    seconds: float
    """Of the whole run."""


@dataclass(frozen=True)
class Criteria:
    """What the measures of the reward depend on."""

    threshold: float
    window: int


def read_result(run: RunDirectory) -> Result:
    """Raises UserError where a file is broken."""
    summary = read_summary(run.summary)
    before, after = summary["eval_before"] or {}, summary["eval_after"] or {}
    return Result(read_columns(run.metrics), before, after, summary["wall_s"])


def steps_to_threshold(rewards: np.ndarray, threshold: float, window: int) -> Value:
    """The first step at which the mean reward of the last `window` steps is at least `threshold`.

    Steps count from 1. A run that never gets there is censored at the step after its last one. A step
    without a reward leaves its mean undecided, which is not reached.
    """
    if len(rewards) >= window:
        means = np.lib.stride_tricks.sliding_window_view(rewards, window).mean(axis=1)
        reached = np.flatnonzero(means >= threshold)
        if len(reached):
            return Value(float(reached[0] + window))
    return Value(float(len(rewards) + 1), censored=True)


def mean_of(values: np.ndarray) -> float:
    """Over the steps that have a finite value; NaN where none has."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


@dataclass(frozen=True)
class Measure:
    """One number a run; `title` may name the criteria."""

    title: str
    of: Callable[[Result, Criteria], Value]
    form: str = "{:.3f}"


def _column(result: Result, key: str) -> np.ndarray:
    return result.columns.get(key, np.full(len(result.columns["step"]), np.nan))


def _whole(key: str) -> Callable[[Result, Criteria], Value]:
    return lambda result, _: Value(mean_of(_column(result, key)))


def _last(key: str) -> Callable[[Result, Criteria], Value]:
    return lambda result, criteria: Value(mean_of(_column(result, key)[-criteria.window :]))


def _gain(result: Result, criteria: Criteria) -> Value:
    rewards, window = _column(result, "reward/mean"), criteria.window
    return Value(mean_of(rewards[-window:]) - mean_of(rewards[:window]))


def _median_step(result: Result, _: Criteria) -> Value:
    """The first step also pays for what is compiled or loaded once."""
    seconds = _column(result, "time/step_s")
    finite = seconds[np.isfinite(seconds)]
    return Value(float(np.median(finite)) if len(finite) else math.nan)


MEASURES = {
    "reward_last": Measure("reward, last {window} steps", _last("reward/mean")),
    "reward_gain": Measure("reward, last {window} steps - first {window}", _gain),
    "steps_to_threshold": Measure(
        "steps to a reward of {threshold:g}",
        lambda result, criteria: steps_to_threshold(
            _column(result, "reward/mean"), criteria.threshold, criteria.window
        ),
        "{:.1f}",
    ),
    "entropy": Measure("entropy (nats), last {window} steps", _last("entropy/mean")),
    "clip_fraction": Measure("clip fraction, all steps", _whole("ratio/clip_fraction"), "{:.4f}"),
    "grad_norm": Measure("gradient norm, all steps", _whole("grad_norm")),
    "response_length": Measure(
        "response length (tokens), last {window} steps", _last("response_length/mean"), "{:.1f}"
    ),
    "step_seconds": Measure("seconds per step, median", _median_step, "{:.2f}"),
}
"""Of the training; `eval/BENCHMARK` is avg@k after it."""


def measure(result: Result, name: str, criteria: Criteria) -> Value:
    """The value of a measure, or of `eval/BENCHMARK`, for one run."""
    if name.startswith(EVALUATION_PREFIX):
        return Value(result.after.get(name.removeprefix(EVALUATION_PREFIX), math.nan))
    return MEASURES[name].of(result, criteria)


def title_of(name: str, criteria: Criteria) -> str:
    """What a column of this measure is called."""
    if name.startswith(EVALUATION_PREFIX):
        return f"{name.removeprefix(EVALUATION_PREFIX)}, after training"
    return MEASURES[name].title.format(window=criteria.window, threshold=criteria.threshold)
