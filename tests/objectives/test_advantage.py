"""Group-relative advantages against Python's own statistics, and the faults that groups are known for."""

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_nemo.objectives import group_advantages, zero_spread_fraction

ESTIMATORS = ["group", "mean", "rloo", "gpg", "gpg_nonzero"]


def advantages(rewards, ids=None, valid=None, estimator="group", dtype=torch.float32):
    rewards = torch.tensor(rewards, dtype=dtype)
    ids = (
        torch.zeros(len(rewards), dtype=torch.int64) if ids is None else torch.tensor(ids, dtype=torch.int64)
    )
    valid = (
        torch.ones(len(rewards), dtype=torch.bool) if valid is None else torch.tensor(valid, dtype=torch.bool)
    )
    result = group_advantages(rewards, ids, valid, estimator)
    assert result.dtype == torch.float32
    return result.tolist()


def expected_advantages(rewards, ids, valid, estimator):
    """One response after the other, from the formulas."""
    members = {g: [r for r, i, v in zip(rewards, ids, valid, strict=True) if i == g and v] for g in ids}
    voting = sum(valid)
    without_spread = sum(len(group) for group in members.values() if len(set(group)) < 2)
    nonzero = sum(v and r != 0 for r, v in zip(rewards, valid, strict=True))
    scale = {
        "gpg": voting / max(voting - without_spread, 1),
        "gpg_nonzero": voting / max(nonzero, 1),
    }.get(estimator, 1.0)
    result = []
    for reward, group_id, is_valid in zip(rewards, ids, valid, strict=True):
        group = members[group_id]
        if not is_valid or len(set(group)) < 2:
            result.append(0.0)
        elif estimator == "rloo":
            result.append(reward - (sum(group) - reward) / (len(group) - 1))
        elif estimator == "group":
            result.append((reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6))
        else:
            result.append(scale * (reward - statistics.fmean(group)))
    return result


@st.composite
def rollouts(draw):
    size = draw(st.integers(1, 24))
    values = (
        st.sampled_from([0.0, 1.0, 0.5, -2.0, 0.7]) if draw(st.booleans()) else st.floats(-5, 5, width=32)
    )
    column = lambda elements: draw(st.lists(elements, min_size=size, max_size=size))  # noqa: E731
    return column(values), column(st.sampled_from([7, -3, 0, 2**40])), column(st.booleans())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(rollout=rollouts(), estimator=st.sampled_from(ESTIMATORS))
def test_every_estimator_matches_its_formula(rollout, estimator):
    """Groups of uneven size, interleaved, with any ids and any failures."""
    expected = expected_advantages(*rollout, estimator)
    assert advantages(*rollout, estimator, dtype=torch.float64) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rollout=rollouts(), estimator=st.sampled_from(ESTIMATORS), seed=st.integers(0, 1000))
def test_the_order_of_responses_does_not_matter(rollout, estimator, seed):
    order = np.random.default_rng(seed).permutation(len(rollout[0]))
    shuffled = [[column[k] for k in order] for column in rollout]
    in_order = np.array(advantages(*rollout, estimator))
    np.testing.assert_allclose(advantages(*shuffled, estimator), in_order[order], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7, -0.1, 1e8 + 0.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(reward, size, estimator):
    """Faults 1, 2, 3: neither NaN nor the 0.86 that rounding can leave of eight times 0.7; also G = 1."""
    for dtype in (torch.float32, torch.float64):
        result = advantages([reward] * size, estimator=estimator, dtype=dtype)
        assert all(value == 0.0 for value in result)


def test_a_tiny_spread_of_the_others_does_not_explode():
    """Faults 2: [0.35] * 7 + [0.05], leave one out: -1,993 where one divides by the std of the others."""
    assert advantages([0.35] * 7 + [0.05], estimator="rloo") == pytest.approx([0.3 / 7] * 7 + [-0.3])
    deviation = math.sqrt((7 * 0.0375**2 + 0.2625**2) / 7)
    expected = [0.0375 / (deviation + 1e-6)] * 7 + [-0.2625 / (deviation + 1e-6)]
    assert advantages([0.35] * 7 + [0.05]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_are_taken_in_float64(dtype):
    """Faults 2: eight rewards around 2**24; their sum in float32 would be off by more than their spread."""
    base = float(2**24)
    rewards = [base, base - 1, base - 1, base - 1, base - 1, base - 1, base - 1, base - 1]
    assert advantages(rewards, estimator="mean", dtype=dtype) == [0.875] + [-0.125] * 7


def test_groups_of_uneven_size_do_not_share_a_baseline():
    """Faults 4: groups of 4, 3 and 4; the three rewards of 5.0 are one group and must be 0."""
    rewards = [1, 0, 0, 0, 5, 5, 5, 0, 1, 1, 1]
    result = advantages(rewards, [0] * 4 + [1] * 3 + [2] * 4, estimator="mean")
    assert result == [0.75, -0.25, -0.25, -0.25, 0, 0, 0, -0.75, 0.25, 0.25, 0.25]


def test_groups_are_found_by_id_not_by_position():
    """Faults 4: p0 p1 p0 p1 with rewards 1 0 1 0: by position +-0.5, in truth 0."""
    assert advantages([1, 0, 1, 0], [0, 1, 0, 1], estimator="mean") == [0, 0, 0, 0]
    assert advantages([1, 1, 0, 0], [0, 1, 0, 1], estimator="mean") == [0.5, 0.5, -0.5, -0.5]


@pytest.mark.parametrize("failed", [1.0, 0.0, 1e30, math.nan, math.inf])
def test_a_failed_reward_does_not_vote(failed):
    """Faults 5: rewards 1 1 0 0 with the second failed are .667 . -.333 -.333, whatever stands there."""
    result = advantages([1, failed, 0, 0], valid=[True, False, True, True], estimator="mean")
    assert result == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert result[1] == 0.0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_that_is_left_with_one_vote_or_none_gets_zero(estimator):
    """Faults 3, 5: seven of eight timed out, then all eight; the other group is as if alone."""
    ids = [0] * 8 + [1] * 2
    for voters in (1, 0):
        valid = [k < voters for k in range(8)] + [True, True]
        result = advantages([1, 0, 0, 0, 0, 0, 0, 0, 1, 0], ids, valid, estimator)
        assert result[:8] == [0.0] * 8
        assert result[8] == -result[9] > 0


def test_a_group_split_over_ranks_would_lose_its_signal():
    """Faults T9: G = 4 over two ranks. Whole: +-0.866; each half alone has no spread and would give 0."""
    whole = advantages([1, 1, 0, 0])
    assert whole == pytest.approx([0.5 / math.sqrt(1 / 3)] * 2 + [-0.5 / math.sqrt(1 / 3)] * 2, rel=1e-5)
    assert advantages([1, 1]) + advantages([0, 0]) == [0, 0, 0, 0]


def test_the_two_scales_of_gpg():
    """8 responses, 4 of them in a group without spread: alpha = 8 / 4; 5 rewards are not 0: alpha = 8 / 5."""
    rewards, ids = [1, 1, 1, 1, 1, 0, 0, 0], [0] * 4 + [1] * 4
    assert advantages(rewards, ids, estimator="gpg") == [0, 0, 0, 0, 1.5, -0.5, -0.5, -0.5]
    assert advantages(rewards, ids, estimator="gpg_nonzero") == pytest.approx(
        [0] * 4 + [1.2, -0.4, -0.4, -0.4]
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_valid_reward_must_be_finite(bad):
    with pytest.raises(ValueError, match="not be valid"):
        advantages([1.0, bad])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_responses_give_no_advantages(estimator):
    assert advantages([], estimator=estimator) == []


@pytest.mark.parametrize(
    ("rewards", "ids", "valid", "expected"),
    [
        ([1, 1, 1, 0], [0, 0, 1, 1], [1, 1, 1, 1], 0.5),
        ([1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1], 1.0),
        ([1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1], 0.0),
        ([1, 0, 1, 0], [0, 0, 1, 1], [1, 0, 1, 1], 0.5),
        ([1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0], 1.0),
        ([0.7] * 8 + [0.7, 0.1], [5] * 8 + [9] * 2, [1] * 10, 0.5),
        ([], [], [], 0.0),
    ],
)
def test_share_of_groups_that_teach_nothing(rewards, ids, valid, expected):
    """Equal, interleaved, failed: with one vote or none a group has no spread either."""
    result = zero_spread_fraction(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(valid).bool(),
    )
    assert result.dim() == 0 and result.item() == expected
