"""Means over seeds, and what they are worth."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from tepo_nemo.study.measures import Value

FEWEST_SEEDS = 3
"""On each side of a comparison; with fewer it is not decided."""
_RESAMPLES = 10_000
_PERCENTILES = (2.5, 97.5)
_SEED = 1

Verdict = Literal["appears", "does not appear", "not decided by these seeds"]


class Interval(NamedTuple):
    """From the 2.5th to the 97.5th percentile of the bootstrap."""

    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """Of one measure over the seeds of one experiment."""

    count: int
    """Runs that have a number."""
    censored: int
    """Those among them whose number is a lower bound; then there is neither mean, deviation nor interval."""
    mean: float | None
    deviation: float | None
    """Standard deviation, unbiased variance; None for fewer than two."""
    interval: Interval | None
    """Of the mean; None for fewer than two."""


def summarize(values: Sequence[Value]) -> Summary:
    """Mean, standard deviation and bootstrap interval of the mean; runs without a number are left out."""
    present = [value for value in values if not math.isnan(value.number)]
    numbers = np.array([value.number for value in present])
    censored = sum(value.censored for value in present)
    if not len(numbers) or censored:
        return Summary(len(numbers), censored, None, None, None)
    if len(numbers) == 1:
        return Summary(1, 0, float(numbers[0]), None, None)
    return Summary(len(numbers), 0, float(numbers.mean()), float(numbers.std(ddof=1)), mean_interval(numbers))


def mean_interval(numbers: np.ndarray) -> Interval:
    """Of the mean over runs [runs], by the percentile bootstrap."""
    means = _resampled_means(numbers, np.random.default_rng(_SEED))
    return Interval(*np.percentile(means, _PERCENTILES).tolist())


def mean_band(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for the mean curve over runs [runs, steps]: its lower and its upper edge [steps].

    A curve may end before others do (NaN): each step has an interval over the runs that have it.
    """
    counts = np.isfinite(curves).sum(axis=0)
    low, high = np.full((2, curves.shape[1]), np.nan)
    for step in np.flatnonzero(counts >= 2):
        low[step], high[step] = mean_interval(curves[np.isfinite(curves[:, step]), step])
    return low, high


def _resampled_means(numbers: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    drawn = generator.integers(len(numbers), size=(_RESAMPLES, len(numbers)))
    return numbers[drawn].mean(axis=1)


@dataclass(frozen=True)
class Comparison:
    """The difference of two means, and whether a direction appears in it."""

    difference: float | None
    interval: Interval | None
    counts: tuple[int, int]
    """Runs on each side; those of the second are 0 where it is the number 0."""
    bound: bool
    """Whether the difference rests on a censored number, which is a lower bound."""
    verdict: Verdict


def compare(
    first: Sequence[Value], second: Sequence[Value] | None, expect: Literal["lower", "higher"]
) -> Comparison:
    """mean(first) - mean(second) with a bootstrap interval, each side resampled by itself; None stands for 0.

    The direction appears where the whole interval is on its side of 0, does not appear where none of it is,
    and is otherwise not decided, nor where a side has fewer than `FEWEST_SEEDS` runs. A censored number is
    a lower bound: it stands for its run where that makes the direction harder to see, and leaves the
    direction undecided where it would make it easier.
    """
    a = np.array([value.number for value in first if not math.isnan(value.number)])
    b = np.array([value.number for value in second or () if not math.isnan(value.number)])
    counts = (len(a), len(b))
    if not len(a) or (second is not None and not len(b)):
        return Comparison(None, None, counts, False, "not decided by these seeds")
    censored = (any(value.censored for value in first), any(value.censored for value in second or ()))
    generator = np.random.default_rng(_SEED)
    differences = _resampled_means(a, generator)
    difference = a.mean()
    if second is not None:
        differences = differences - _resampled_means(b, generator)
        difference = difference - b.mean()
    few = min(counts if second is not None else counts[:1])
    interval = Interval(*np.percentile(differences, _PERCENTILES).tolist()) if few >= 2 else None
    decided = few >= FEWEST_SEEDS and not censored[0 if expect == "lower" else 1]
    verdict = _verdict(interval, expect) if decided and interval else "not decided by these seeds"
    return Comparison(float(difference), interval, counts, any(censored), verdict)


def _verdict(interval: Interval, expect: Literal["lower", "higher"]) -> Verdict:
    low, high = interval if expect == "higher" else (-interval.high, -interval.low)
    if low > 0:
        return "appears"
    return "does not appear" if high <= 0 else "not decided by these seeds"
