"""EP-GRPO: progress by entropy and groups without spread, against the formulas in plain loops and by hand."""

import math

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.cases import PRESETS, build_preset, preset
from objectives.process import OPTIONS, Response, assert_shaped, rollouts, shaped, to_rollout


def by_entropy(buckets):
    def bucket(response, t):
        total = sum(response.old_entropy)
        progress = sum(response.old_entropy[:t]) / total if total > 0 else 0.0
        return min(math.floor(buckets * progress), buckets - 1)

    return bucket


def outcome(response, members):
    """sgn(A); in a group without spread, what all of it is."""
    if any(other.advantage for other in members):
        return float(np.sign(response.advantage))
    verdicts = {other.reward > 0 for other in members}
    return {(True,): 1.0, (False,): -1.0}.get(tuple(verdicts), 0.0)


def shape(responses, width=None, **options):
    return build_preset("ep_grpo", **options).shape_advantages(to_rollout(responses, width))


def make(reward, advantage, signal, entropy):
    return Response(0, reward, advantage, signal, entropy, [0.0] * len(signal))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(responses=rollouts(), options=st.fixed_dictionaries(OPTIONS))
def test_advantages_match_the_formulas(responses, options):
    width = 1 + max(len(response.old_entropy) for response in responses)
    expected = shaped(responses, options, by_entropy(options["buckets"]), outcome)
    assert_shaped(shape(responses, width, **options), expected)


@pytest.mark.parametrize(
    ("entropy", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0, 1, 2, 3]),
        ([4.0, 1.0, 1.0, 2.0], [0, 2, 2, 3]),  # 0, 1/2, 5/8, 3/4
        ([0.0, 0.0, 8.0, 0.0, 0.0], [0, 0, 0, 3, 3]),  # all of it is spent: the last stage, not a fifth
        ([0.0, 0.0], [0, 0]),  # nothing to measure by
        ([3.0], [0]),
    ],
)
def test_progress_is_entropy_that_is_spent(entropy, expected):
    rollout = to_rollout([make(0.0, 1.0, [0.0] * len(entropy), entropy)], width=6)
    assert build_preset("ep_grpo", buckets=4).bucket(rollout)[0, : len(entropy)].tolist() == expected


@pytest.mark.parametrize(("reward", "sign"), [(1.0, 1), (0.0, -1), (-1.0, -1)])
def test_a_group_without_spread_still_teaches(reward, sign):
    """All correct: tokens that the policy has made likelier than the reference go up; none correct: down.

    K = 1 and equal entropies: s = .1 .3 | -.1 -.3 in units of its std sqrt(.05), which the z-score keeps.
    """
    responses = [make(reward, 0.0, [0.1, 0.3], [1.0, 1.0]), make(reward, 0.0, [-0.1, -0.3], [1.0, 1.0])]
    actual = shape(responses, buckets=1)
    expected = sign * np.array([[0.1, 0.3], [-0.1, -0.3]]) / math.sqrt(0.05)
    np.testing.assert_allclose(actual, expected, rtol=5e-5)


def test_directions_by_hand():
    """Groups with spread, all correct, none correct, and equal after shaping though not equally correct."""
    rows = [
        (0, 1.0, 0.7), (0, 0.0, -0.7), (0, 0.5, 0.0),
        (1, 1.0, 0.0), (1, 0.5, 0.0),
        (2, 0.0, 0.0), (2, -1.0, 0.0),
        (3, 1.0, 0.0), (3, 0.0, 0.0),
    ]  # fmt: skip
    responses = [Response(group, reward, advantage, [0.0], [1.0], [0.0]) for group, reward, advantage in rows]
    direction = build_preset("ep_grpo").direction(to_rollout(responses))
    np.testing.assert_allclose(direction, [1, -1, 0, 1, 1, -1, -1, 0, 0])


@pytest.mark.parametrize("reward", [math.nan, 1.0, 0.0])
def test_a_response_without_a_verdict_does_not_vote(reward):
    """Three that are all correct, or all wrong, and one whose grading failed."""
    failed = Response(0, reward, 0.0, [], [], [])
    for right in (1.0, 0.0):
        graded = [make(right, 0.0, [signal, 0.0], [1.0, 2.0]) for signal in (0.1, 0.5, -0.3)]
        actual = shape([graded[0], failed, *graded[1:]])
        assert torch.equal(actual[[0, 2, 3]], shape(graded)) and actual.any()
        assert not actual[1].any()


def test_at_the_first_rollout_such_a_group_teaches_nothing():
    """The policy is the reference: s = 0, and neither NaN nor noise comes of it."""
    assert not shape([make(1.0, 0.0, [0.0, 0.0], [1.0, 2.0])] * 3).any()


def test_the_preset_is_erpos_but_for_dynamic_sampling():
    """Dropping groups without spread would drop what the method is for."""
    assert preset("ep_grpo") == preset("erpo")
    ours, erpos = (yaml.safe_load((PRESETS / f"{name}.yaml").read_text()) for name in ("ep_grpo", "erpo"))
    assert not ours["dynamic_sampling"] and erpos["dynamic_sampling"]
