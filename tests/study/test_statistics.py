"""Means over seeds and verdicts, against counts by hand, all resamples in a row, and SciPy."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from tepo_nemo.study.measures import Value
from tepo_nemo.study.statistics import compare, mean_band, mean_interval, summarize


def values(*numbers: float) -> list[Value]:
    return [Value(number) for number in numbers]


def every_resample(numbers: list[float]) -> np.ndarray:
    return np.array([np.mean(drawn) for drawn in itertools.product(numbers, repeat=len(numbers))])


def test_summary_by_hand():
    summary = summarize(values(1.0, 2.0, 6.0))
    assert (summary.count, summary.censored, summary.mean) == (3, 0, 3.0)
    # squares 4 + 1 + 9 = 14 over n - 1 = 2
    assert summary.deviation == pytest.approx(math.sqrt(7))
    # 27 resamples: all of 1s, and all of 6s, each with 1/27 > 2.5 %
    assert summary.interval == (1.0, 6.0)


def test_of_two_seeds_the_interval_is_their_range():
    assert summarize(values(0.25, 0.75)).interval == (0.25, 0.75)


def test_with_one_seed_nothing_is_claimed():
    summary = summarize(values(0.5))
    assert (summary.mean, summary.deviation, summary.interval) == (0.5, None, None)


def test_runs_without_a_number_are_left_out_and_counted():
    summary = summarize(values(math.nan, 2.0, 4.0))
    assert (summary.count, summary.mean) == (2, 3.0)
    assert summarize(values(math.nan)).mean is None
    assert summarize([]).count == 0


def test_a_censored_number_is_told_and_not_averaged():
    summary = summarize([Value(10.0), Value(73.0, censored=True), Value(12.0)])
    assert (summary.count, summary.censored) == (3, 1)
    assert (summary.mean, summary.deviation, summary.interval) == (None, None, None)


NUMBERS = [0.31, 0.42, 0.28, 0.77, 0.50]


def test_interval_is_that_of_all_resamples():
    """5 ** 5 of them; the grid of their means is fine enough to come within a few thousandths."""
    expected = np.percentile(every_resample(NUMBERS), [2.5, 97.5])
    np.testing.assert_allclose(mean_interval(np.array(NUMBERS)), expected, atol=0.01)


def test_interval_is_scipys():
    expected = scipy.stats.bootstrap(
        (NUMBERS,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(5)
    ).confidence_interval
    np.testing.assert_allclose(mean_interval(np.array(NUMBERS)), expected, atol=0.01)


def test_interval_of_a_difference_is_scipys():
    first, second = [1.0, 1.4, 0.7, 1.9, 1.1], [0.2, 0.9, 0.5]
    expected = scipy.stats.bootstrap(
        (first, second),
        lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis),
        method="percentile", n_resamples=20_000, rng=np.random.default_rng(5),
    ).confidence_interval  # fmt: skip
    found = compare(values(*first), values(*second), "higher")
    np.testing.assert_allclose(found.interval, expected, atol=0.02)
    assert found.difference == pytest.approx(1.22 - 1.6 / 3)
    assert found.counts == (5, 3)


def test_a_band_has_the_interval_of_every_step():
    curves = np.array([[1.0, 5.0, 2.0], [3.0, 5.0, math.nan], [8.0, 5.0, 4.0], [2.0, 5.0, math.nan]])
    low, high = mean_band(curves)
    assert (low[1], high[1]) == (5.0, 5.0)
    assert (low[0], high[0]) == mean_interval(curves[:, 0])
    assert (low[2], high[2]) == (2.0, 4.0)  # of the two runs that are as long as that
    assert np.isnan(mean_band(curves[:1])).all()


HIGH, LOW, MIXED = values(5, 6, 7), values(1, 2, 3), values(1, 6, 7)


@pytest.mark.parametrize(
    ("first", "second", "expect", "verdict"),
    [
        (HIGH, LOW, "higher", "appears"),
        (LOW, HIGH, "lower", "appears"),
        (HIGH, LOW, "lower", "does not appear"),
        (LOW, HIGH, "higher", "does not appear"),
        (MIXED, HIGH, "higher", "not decided by these seeds"),
        (MIXED, HIGH, "lower", "not decided by these seeds"),
        # equal without spread: no value on either side
        (values(2, 2, 2), values(2, 2, 2), "lower", "does not appear"),
        (values(2, 2, 2), values(2, 2, 2), "higher", "does not appear"),
        # too few on one side
        (values(5, 6), LOW, "higher", "not decided by these seeds"),
        (HIGH, values(1, 2), "higher", "not decided by these seeds"),
        (values(5, 6, math.nan), LOW, "higher", "not decided by these seeds"),
        (HIGH, [], "higher", "not decided by these seeds"),
        # compared with 0
        (values(-1, -2, -3), None, "lower", "appears"),
        (values(-1, -2, -3), None, "higher", "does not appear"),
        (values(-1, 2, -3), None, "lower", "not decided by these seeds"),
        (values(-1, -2), None, "lower", "not decided by these seeds"),
    ],
)
def test_verdicts(first, second, expect, verdict):
    assert compare(first, second, expect).verdict == verdict


NEVER = Value(73.0, censored=True)


@pytest.mark.parametrize(
    ("first", "second", "expect", "verdict"),
    [
        # the other side would need even more steps: that hides the difference, and it shows all the same
        (values(10, 11, 12), [*values(40, 50), NEVER], "lower", "appears"),
        # this side would need more, which would make it the later one
        ([*values(10, 11), NEVER], values(80, 90, 85), "lower", "not decided by these seeds"),
        ([NEVER] * 3, values(10, 11, 12), "higher", "appears"),
        (values(80, 90, 85), [NEVER] * 3, "higher", "not decided by these seeds"),
    ],
)
def test_a_censored_number_decides_nothing_in_its_favour(first, second, expect, verdict):
    found = compare(first, second, expect)
    assert (found.verdict, found.bound) == (verdict, True)


def test_no_interval_of_a_difference_with_one_seed_on_a_side():
    found = compare(HIGH, values(1), "higher")
    assert (found.difference, found.interval) == (5.0, None)


def test_the_same_numbers_have_the_same_interval():
    assert mean_interval(np.array(NUMBERS)) == mean_interval(np.array(NUMBERS))
