"""Estimators against their definitions: every draw of k of the n samples is enumerated."""

from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_nemo.evaluation.estimators import bootstrap_interval, majority_at_k, pass_at_k


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_answer(samples):
    for correct in range(samples + 1):
        right = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            draws = list(combinations(right, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many_samples():
    """One of 32 is correct: it is drawn with probability k / 32."""
    assert [pass_at_k(32, 1, k) for k in (1, 8, 32)] == pytest.approx([1 / 32, 8 / 32, 1])


def votes_of_a_draw(answers, values, draw):
    """The expected value of the winner, who is drawn among the most frequent."""
    votes = Counter(answers[place] for place in draw if answers[place] is not None)
    if not votes:
        return Fraction(0)
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    worth = [
        Fraction(sum(v for a, v in zip(answers, values, strict=True) if a == answer), answers.count(answer))
        for answer in first
    ]
    return sum(worth) / len(first)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=7), st.data())
def test_majority_at_k_is_the_mean_over_all_draws(answers, data):
    right = data.draw(st.sets(st.sampled_from(["1", "2", "3"])))
    values = [1 if answer in right else 0 for answer in answers]
    for k in range(1, len(answers) + 1):
        draws = list(combinations(range(len(answers)), k))
        expected = sum(votes_of_a_draw(answers, values, draw) for draw in draws) / len(draws)
        assert majority_at_k(answers, values, k) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["7", "7", "5"], 1),  # the majority is right
        (["7", "5", "5"], 0),
        (["7", "5", None], 0.5),  # a tie
        ([None, None, None], 0),
        (["7", None, None], 1),  # silence is no vote
    ],
)
def test_majority_of_all_samples(answers, expected):
    assert majority_at_k(answers, [float(answer == "7") for answer in answers], 3) == expected


def test_majority_and_pass_of_one_sample_are_the_average():
    values = [1.0, 0.0, 0.0, 1.0]
    assert majority_at_k(["1", "2", "3", "1"], values, 1) == pytest.approx(0.5)
    assert pass_at_k(4, 2, 1) == pytest.approx(0.5)


def test_an_answer_graded_both_ways_is_worth_its_mean():
    """Its text is the same, so the samples cannot be told apart."""
    assert majority_at_k(["1", "1", "2"], [1.0, 0.0, 0.0], 3) == pytest.approx(0.5)


@pytest.mark.parametrize("k", [0, 5])
def test_more_than_the_samples_is_refused(k):
    for estimate in (lambda: pass_at_k(4, 1, k), lambda: majority_at_k(["1"] * 4, [1.0] * 4, k)):
        with pytest.raises(ValueError, match=f"k is {k} and there are 4 samples"):
            estimate()


def test_the_interval_is_that_of_the_mean():
    """400 problems, half of them right: the mean's standard error is 0.025."""
    low, high = bootstrap_interval([[0.0, 1.0] * 200], [1.0])
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.005)
    assert bootstrap_interval([[0.0, 1.0] * 200], [1.0]) == (low, high)


def test_the_interval_of_several_sets_adds_their_variances():
    sets, weights = [[0.0, 1.0] * 50, [0.0, 0.0, 0.0, 1.0] * 100], [0.3, 0.7]
    error = np.sqrt(0.3**2 * 0.25 / 100 + 0.7**2 * 0.1875 / 400)
    centre = 0.3 * 0.5 + 0.7 * 0.25
    expected = (centre - 1.96 * error, centre + 1.96 * error)
    assert bootstrap_interval(sets, weights) == pytest.approx(expected, abs=0.005)


def test_problems_that_all_score_the_same_leave_no_doubt():
    assert bootstrap_interval([[1.0] * 5, [0.0] * 3], [0.5, 0.5]) == (0.5, 0.5)
