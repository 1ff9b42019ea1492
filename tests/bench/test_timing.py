"""Paired times: the order of turns, the median of ratios, and how sure it is."""

import math

import numpy as np
import pytest
import torch.distributed as dist

from tepo_nemo.bench.timing import Times, ratio, time_pairs, time_run


def test_two_things_take_turns_as_abba_and_pairs_keep_their_sides():
    order = []

    def timed(name):
        order.append(name)
        return Times(0.0, float(len(order)))

    pairs = time_pairs(lambda: timed("a"), lambda: timed("b"), 4)
    assert "".join(order) == "abbaabba"
    assert [(a.total, b.total) for a, b in pairs] == [(1, 2), (4, 3), (5, 6), (8, 7)]


def test_the_ratio_is_the_median_of_the_ratios_not_the_ratio_of_the_medians():
    # Ratios 2, 4, 1; the medians of the columns are 2 and 4.
    assert ratio([(1.0, 2.0), (2.0, 8.0), (4.0, 4.0)]).median == 2.0


def test_equal_ratios_leave_no_doubt():
    assert ratio([(1.0, 3.0), (2.0, 6.0), (0.5, 1.5)]) == (3.0, 3.0, 3.0)


def test_the_interval_covers_the_true_median_as_often_as_it_says():
    """Of 200 experiments with 15 pairs whose true median ratio is 2, about 95 % cover it."""
    random = np.random.default_rng(7)
    covered = 0
    for experiment in range(200):
        pairs = [(1.0, 2 * math.exp(noise)) for noise in random.normal(0, 0.2, size=15)]
        found = ratio(pairs, resamples=400, seed=experiment)
        covered += found.low <= 2 <= found.high
    assert 180 <= covered <= 200


@pytest.mark.parametrize("resamples", [100, 1000])
def test_the_interval_lies_within_the_ratios_and_around_their_median(resamples):
    found = ratio([(1.0, value) for value in (1.0, 2.0, 3.0, 4.0, 100.0)], resamples=resamples)
    assert 1 <= found.low < found.median == 3 < found.high <= 100


class _Sleeper:
    """Forward and backward of given lengths."""

    def __init__(self, forward, backward):
        self.lengths = {"forward": forward, "backward": backward}

    def forward(self):
        _wait(self.lengths["forward"])

    def backward(self):
        _wait(self.lengths["backward"])


def _wait(seconds):
    import time

    time.sleep(seconds)


def run_of_uneven_ranks(rank, world_size):
    return time_run(lambda: _Sleeper(0.05 * rank, 0.1 * (1 - rank)))


def test_the_time_is_that_of_the_slowest_rank_on_every_rank(worlds):
    first, second = worlds(2).run(run_of_uneven_ranks)
    assert first == second
    # Sleeping is never shorter: rank 1 sleeps 0.05 s forward, rank 0 0.1 s in all.
    assert first.forward >= 0.05 and first.total >= 0.1


def barrier_before_the_clock(rank, world_size):
    """A rank that makes its inputs slowly does not count as slow."""
    made = []

    def make():
        _wait(0.3 * rank)
        made.append(dist.get_rank())
        return _Sleeper(0.0, 0.0)

    return time_run(make).total, made


def test_making_inputs_is_not_timed(worlds):
    for total, made in worlds(2).run(barrier_before_the_clock):
        assert total < 0.3
        assert len(made) == 1
