"""DAPO: GRPO with a higher upper clip and the mean over tokens, and its rewards of long responses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from objectives.cases import Case, assert_same, build_preset, cases, preset, run
from objectives.reference import reference

from tepo_nemo.objectives import overlong_penalty


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases())
def test_loss_gradients_and_metrics_match_the_formulas(case):
    assert_same(run(build_preset("dapo"), case), reference(case, preset("dapo")))


def test_the_preset_says_what_the_paper_says():
    """arXiv 2503.14476: clip 0.2 / 0.28, the mean over tokens, no KL; the baseline differs in its clip."""
    assert preset("dapo") == preset("grpo_dapo") | {"clip_high": 0.28, "dual_clip": None}
    assert preset("dapo")["clip_low"] == 0.2 and preset("dapo")["aggregation"] == "token-mean"
    assert not build_preset("dapo").needs_reference


@pytest.mark.parametrize(
    ("advantage", "ratio", "kept"),
    [(1.0, 1.27, 1.27), (1.0, 1.3, 1.28), (-1.0, 0.75, 0.8), (-1.0, 0.85, 0.85), (-1.0, 12.0, 12.0)],
)
def test_the_clip_on_either_side(advantage, ratio, kept):
    one, zero = np.ones((1, 1)), np.zeros((1, 1))
    case = Case(one * math.log(ratio), zero, zero, zero, zero, one * advantage, one == 1, np.zeros(1))
    result = run(build_preset("dapo"), case)
    assert result.loss == pytest.approx(-advantage * kept, rel=1e-12)
    assert result.logprob_gradient.item() == pytest.approx(-advantage * ratio * (kept == ratio), rel=1e-12)


@pytest.mark.parametrize(
    ("longest", "fraction", "expected"),
    [
        # The paper's 20480 with a cache of 4096.
        (20480, 0.2, {1: 0, 16384: 0, 16385: -1 / 4096, 17408: -0.25, 18432: -0.5, 20480: -1}),
        (8, 0.25, {1: 0, 6: 0, 7: -0.5, 8: -1}),
        (8, 0.2, {6: 0, 7: -0.375, 8: -1}),  # a cache of 1.6 tokens
        (10, 1.0, {0: 0, 1: -0.1, 5: -0.5, 10: -1}),
        (10, 0.0, {0: 0, 9: 0, 10: 0}),
    ],
)
def test_what_long_responses_lose_by_hand(longest, fraction, expected):
    penalty = overlong_penalty(torch.tensor(list(expected)), longest, fraction)
    assert penalty.dtype == torch.float64
    assert penalty.tolist() == pytest.approx(list(expected.values()), abs=1e-12)
    assert penalty[-1] in (0, -1)  # exactly
