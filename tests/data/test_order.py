from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo_nemo.data.order import PromptOrder


@pytest.mark.parametrize("n", [1, 2, 6, 1000])
def test_every_epoch_takes_every_prompt_once(n):
    order = PromptOrder(n, seed=1)
    for epoch in range(4):
        assert sorted(order.take(epoch * n, n)) == list(range(n))


def test_epochs_and_seeds_differ():
    orders = [
        tuple(PromptOrder(50, seed).take(epoch * 50, 50))
        for seed in (0, 1, 2, 2**64 - 1)
        for epoch in range(4)
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(50)) not in orders


def test_a_seed_does_not_repeat_the_epochs_of_its_neighbour():
    """Deriving the epoch's generator from seed + epoch would."""
    first, second = (PromptOrder(50, seed).take(0, 500) for seed in (1, 2))
    epochs = [tuple(order[i : i + 50]) for order in (first, second) for i in range(0, 500, 50)]
    assert len(set(epochs)) == 20


def test_places_are_uniform():
    """Prompt 0 stands at each of 10 places equally often in 2000 epochs: chi-square, p = 1e-4."""
    order = PromptOrder(10, seed=3)
    counts = Counter(order.take(epoch * 10, 10).index(0) for epoch in range(2000))
    assert sum((counts[place] - 200) ** 2 / 200 for place in range(10)) < 33.7


@given(n=st.integers(1, 7), seed=st.integers(0, 2**64 - 1), cuts=st.lists(st.integers(0, 9), max_size=8))
def test_batches_of_any_size_are_cuts_of_one_sequence(n, seed, cuts):  # faults 27
    whole = PromptOrder(n, seed).take(0, sum(cuts))
    consumed, pieces = 0, []
    for count in cuts:  # a new object each time, as after a resume
        pieces += PromptOrder(n, seed).take(consumed, count)
        consumed += count
    assert pieces == whole


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_resume_neither_repeats_nor_skips_a_prompt(stop):  # faults 27
    """6 prompts, 2 a step, 5 steps; stopped after a step inside an epoch, at its edge, and past it."""
    uninterrupted = [PromptOrder(6, 1).take(2 * step, 2) for step in range(5)]
    resumed = [PromptOrder(6, 1).take(2 * step, 2) for step in range(stop)]
    resumed += [PromptOrder(6, 1).take(2 * step, 2) for step in range(stop, 5)]
    assert resumed == uninterrupted
    seen = Counter(index for batch in resumed for index in batch)
    assert sum(seen.values()) == 10 and set(seen.values()) == {1, 2}


def test_a_batch_crosses_the_edge_of_an_epoch():  # faults 27
    order = PromptOrder(6, seed=1)
    assert order.take(4, 4) == order.take(0, 6)[4:] + order.take(6, 6)[:2]
    assert Counter(order.take(3, 18)) == {index: 3 for index in range(6)}  # more than an epoch at once


def test_take_changes_nothing_and_returns_integers():
    order = PromptOrder(6, seed=1)
    first = order.take(4, 4)
    first[0] = 99
    np.random.seed(0)
    order.take(0, 100)
    assert order.take(4, 4) == PromptOrder(6, seed=1).take(4, 4)
    assert all(type(index) is int for index in order.take(0, 6))
    assert order.take(5, 0) == []


@pytest.mark.parametrize("arguments", [(0, 1), (-1, 1), (5, -1), (5, 2**64)])
def test_impossible_orders_are_refused(arguments):
    with pytest.raises(ValueError):
        PromptOrder(*arguments)


@pytest.mark.parametrize("arguments", [(-1, 1), (0, -1)])
def test_impossible_places_are_refused(arguments):
    with pytest.raises(ValueError):
        PromptOrder(5, 1).take(*arguments)
