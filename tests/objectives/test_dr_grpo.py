"""Dr.GRPO: GRPO without the std of the group and without the length of the response."""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from objectives.cases import (
    MAX_LENGTH,
    PRESETS,
    Case,
    assert_same,
    build_preset,
    cases,
    make_case,
    preset,
    run,
)
from objectives.reference import reference


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases())
def test_loss_gradients_and_metrics_match_the_formulas(case):
    assert_same(run(build_preset("dr_grpo"), case), reference(case, preset("dr_grpo")))


def test_the_preset_says_what_the_paper_says():
    """arXiv 2503.20783: A = R - mean, and the constant longest length as denominator; no KL."""
    values = yaml.safe_load((PRESETS / "dr_grpo.yaml").read_text())
    assert values["advantage"] == "mean"
    assert preset("dr_grpo") == preset("grpo") | {"aggregation": "seq-mean-token-sum-norm"}
    assert not build_preset("dr_grpo").needs_reference


@pytest.mark.parametrize("length", [MAX_LENGTH, 4])
def test_at_equal_lengths_it_is_grpo_up_to_one_constant(length):
    """The same advantages given: |o| / L_max times GRPO, so the same where responses have full length."""
    case = make_case(4, 5, length, density=1.0)
    ours, grpo = (run(build_preset(name), case) for name in ("dr_grpo", "grpo"))
    assert ours.loss == pytest.approx(grpo.loss * length / MAX_LENGTH, rel=1e-12)
    np.testing.assert_allclose(
        ours.logprob_gradient, grpo.logprob_gradient * length / MAX_LENGTH, rtol=1e-12, atol=1e-15
    )


def test_at_unequal_lengths_tokens_weigh_alike():
    """A = 1 on 1 token and on 3: each token weighs 1 / 2 / 16 here, and 1 / 2 or 1 / 6 in GRPO."""
    mask = np.array([[True, False, False], [True, True, True]])
    zeros = np.zeros((2, 3))
    case = Case(zeros, zeros, zeros, zeros, zeros, zeros + 1, mask, np.zeros(2))
    ours, grpo = (run(build_preset(name), case) for name in ("dr_grpo", "grpo"))
    np.testing.assert_allclose(-ours.logprob_gradient, np.where(mask, 1 / 32, 0))
    np.testing.assert_allclose(-grpo.logprob_gradient, np.where(mask, [[1 / 2], [1 / 6]], 0))
    shorter = replace(case, mask=np.array([[True, False, False]] * 2))
    assert run(build_preset("dr_grpo"), shorter).loss == pytest.approx(-1 / MAX_LENGTH)
