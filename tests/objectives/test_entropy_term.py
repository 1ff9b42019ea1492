"""The entropy-based advantage term against the float64 reference."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.cases import (
    AGGREGATIONS,
    Case,
    assert_same,
    build_preset,
    cases,
    make_case,
    preset,
    run,
    token_batch,
    totals,
)
from objectives.reference import Term, bounded_exp, summed, surrogate

from tepo_nemo.errors import UserError
from tepo_nemo.objectives import build

OPTIONS = {
    "entropy_coefficient": st.sampled_from([0.0, 0.1, 0.4, 10.0]),
    "advantage_divisor": st.sampled_from([1.01, 2.0, 5.0]),
    "clip_low": st.sampled_from([0.0, 0.2, 1.0, math.inf]),
    "clip_high": st.sampled_from([0.0, 0.28, 1.0, math.inf]),
    "dual_clip": st.sampled_from([None, 1.1, 10.0]),
    "aggregation": st.sampled_from(AGGREGATIONS),
}


def entropy_term_reference(case: Case, options: dict):
    """GRPO's loss token by token, each with A + min(alpha H, |A| / kappa)."""

    def terms(cells):
        for n, cell in enumerate(cells):
            a = case.advantages[cell]
            a += min(
                options["entropy_coefficient"] * case.entropy[cell], abs(a) / options["advantage_divisor"]
            )
            ratio, ratio_slope = bounded_exp(case.logprobs[cell] - case.old_logprobs[cell])
            gain, slope, cut = surrogate(
                "ppo", ratio, a, options["clip_low"], options["clip_high"], options["dual_clip"]
            )
            slopes = np.zeros(len(cells))
            slopes[n] = -slope * ratio_slope
            yield Term(-gain, slopes, ratio, cut)

    return summed(case, terms, options["aggregation"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases(), options=st.fixed_dictionaries(OPTIONS))
def test_loss_gradients_and_metrics_match_the_formulas(case, options):
    """Among them an entropy without gradient."""
    assert_same(run(build("entropy_term", options), case), entropy_term_reference(case, options))


def test_numerical_derivative_in_float64():
    case, objective = make_case(3, 4, 5, shaped=True), build_preset("entropy_term")

    def loss(logprobs):
        return objective(replace(token_batch(case), logprobs=logprobs), totals(case)).loss

    assert torch.autograd.gradcheck(
        loss, torch.tensor(np.where(case.mask, case.logprobs, 0), requires_grad=True)
    )


@pytest.mark.parametrize(
    ("advantage", "entropy", "raised"),
    [
        (1.0, 0.5, 1.2),  # alpha H = 0.2
        (1.0, 3.0, 1.5),  # |A| / kappa = 0.5
        (-1.0, 0.5, -0.8),
        (-1.0, 3.0, -0.5),
        (1.0, 0.0, 1.0),
        (0.0, 3.0, 0.0),
    ],
)
@pytest.mark.parametrize(("ratio", "clip"), [(1.0, 1.0), (1.5, 1.2), (0.5, 0.8)])
def test_one_token_by_hand(advantage, entropy, raised, ratio, clip):
    """alpha = 0.4, kappa = 2: the term is bounded, never changes the sign of A, and precedes the clip."""
    one, zero = np.ones((1, 1)), np.zeros((1, 1))
    case = Case(
        one * math.log(ratio), zero, zero, one * entropy, zero, one * advantage, one == 1, np.zeros(1)
    )
    result = run(build_preset("entropy_term"), case)
    expected = min(ratio * raised, clip * raised)
    assert result.loss == pytest.approx(-expected, rel=1e-12)
    assert result.metrics["ratio/clip_fraction"] == (float(expected < ratio * raised), 1)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(case=cases())
def test_without_entropy_it_is_the_dapo_baseline(case):
    baseline = run(build_preset("grpo_dapo"), case)
    assert_same(run(build_preset("entropy_term", entropy_coefficient=0.0), case), baseline, tolerance=1e-12)


def test_with_entropy_it_is_not():
    case = make_case(3, 4, 5)
    assert run(build_preset("entropy_term"), case).loss != run(build_preset("grpo_dapo"), case).loss


@pytest.mark.parametrize("divisor", [1.0, 0.5, math.inf])
def test_a_divisor_that_could_change_the_sign_or_switch_the_term_off_is_refused(divisor):
    with pytest.raises(UserError, match=rf"^algorithm.advantage_divisor = {divisor}: it should be"):
        build_preset("entropy_term", advantage_divisor=divisor)


def test_the_preset_says_what_the_paper_says():
    """arXiv 2506.14758: alpha = 0.4, kappa = 2; the rest is the baseline of the comparison."""
    assert preset("entropy_term") == {
        "entropy_coefficient": 0.4,
        "advantage_divisor": 2.0,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 10.0,
        "aggregation": "token-mean",
    }
