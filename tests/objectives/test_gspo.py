"""GSPO and GSPO-token against the float64 reference, and what makes them one, and one with TEPO."""

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
    run,
    token_batch,
    totals,
)
from objectives.reference import Term, summed

from tepo_nemo.objectives import build

OPTIONS = {
    "ratio_gradient": st.sampled_from(["full", "stop_gradient"]),
    "clip_low": st.sampled_from([0.0, 3e-4, 0.2, 1.0, math.inf]),
    "clip_high": st.sampled_from([0.0, 4e-4, 0.2, 1.0, math.inf]),
    "aggregation": st.sampled_from(AGGREGATIONS),
}


def gspo_reference(case: Case, options: dict):
    """min(s A, clip(s) A) with s = exp(mean d); ds/dlogp is s/|o|, or s at the token itself alone."""
    low, high = 1 - options["clip_low"], 1 + options["clip_high"]

    def terms(cells):
        for n, cell in enumerate(cells):
            mean = sum(case.logprobs[other] - case.old_logprobs[other] for other in cells) / len(cells)
            s, a = math.exp(min(max(mean, -20.0), 20.0)), case.advantages[cell]
            cut = (a > 0 and s > high) or (a < 0 and s < low)
            slopes = np.zeros(len(cells))
            if not cut and abs(mean) <= 20:
                if options["ratio_gradient"] == "full":
                    slopes[:] = -a * s / len(cells)
                else:
                    slopes[n] = -a * s
            yield Term(-min(s * a, min(max(s, low), high) * a), slopes, s, cut)

    return summed(case, terms, options["aggregation"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases(), options=st.fixed_dictionaries(OPTIONS))
def test_loss_gradients_and_metrics_match_the_formulas(case, options):
    assert_same(run(build("gspo", options), case), gspo_reference(case, options))


def test_numerical_derivative_in_float64():
    case, objective = make_case(3, 4, 5, shaped=True), build_preset("gspo", clip_low=0.1, clip_high=0.15)

    def loss(logprobs):
        return objective(replace(token_batch(case), logprobs=logprobs), totals(case)).loss

    assert torch.autograd.gradcheck(
        loss, torch.tensor(np.where(case.mask, case.logprobs, 0), requires_grad=True)
    )


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize(
    ("advantage", "log_ratio", "ratio", "cut"),
    [
        (1.0, 0.01, 1.0004, True),
        (1.0, -0.01, math.exp(-0.01), False),
        (-1.0, 0.01, math.exp(0.01), False),
        (-1.0, -0.01, 0.9997, True),
        (1.0, 3e-4, math.exp(3e-4), False),
        (-1.0, -2e-4, math.exp(-2e-4), False),
    ],
)
def test_the_shipped_clip_on_either_side(name, advantage, log_ratio, ratio, cut):
    """Two tokens whose mean log-ratio is the given one, though each alone is far outside of the clip."""
    zeros = np.zeros((1, 2))
    d = np.array([[log_ratio + 0.5, log_ratio - 0.5]])
    case = Case(d, zeros, zeros, zeros, zeros, zeros + advantage, np.ones((1, 2), bool), np.zeros(1))
    result = run(build_preset(name), case)
    assert result.loss == pytest.approx(-advantage * ratio, rel=1e-12)
    gradient = 0 if cut else -advantage * ratio / 2
    np.testing.assert_allclose(result.logprob_gradient, [[gradient, gradient]], rtol=1e-12)
    assert result.metrics["ratio/clip_fraction"] == (2 * cut, 2)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), low=OPTIONS["clip_low"], high=OPTIONS["clip_high"])
def test_gspo_token_is_gspo_while_the_advantage_is_constant(seed, low, high):
    case = make_case(seed, 4, 5, spread=0.5)
    token, whole = (
        run(build_preset(name, clip_low=low, clip_high=high), case) for name in ("gspo_token", "gspo")
    )
    assert_same(token, whole)


def test_they_part_where_the_advantage_varies():
    """Two tokens at s = 1 with A = 2 and 0: GSPO shares A over both, GSPO-token does not."""
    zeros, mask = np.zeros((1, 2)), np.ones((1, 2), bool)
    case = Case(zeros, zeros, zeros, zeros, zeros, np.array([[2.0, 0.0]]), mask, np.zeros(1))
    whole, token = (run(build_preset(name), case) for name in ("gspo", "gspo_token"))
    assert whole.loss == token.loss == -1.0
    np.testing.assert_allclose(whole.logprob_gradient, [[-0.5, -0.5]])
    np.testing.assert_allclose(token.logprob_gradient, [[-1.0, 0.0]])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(case=cases(), low=OPTIONS["clip_low"], high=OPTIONS["clip_high"])
@pytest.mark.parametrize(("name", "ratio_gradient"), [("gspo", "full"), ("gspo_token", "stop_gradient")])
def test_it_is_tepo_without_kl_and_with_the_mean_over_responses(case, low, high, name, ratio_gradient):
    clip = {"clip_low": low, "clip_high": high}
    tepo = build_preset(
        "tepo_no_kl", aggregation="seq-mean-token-mean", ratio_gradient=ratio_gradient, **clip
    )
    assert_same(run(build_preset(name, **clip), case), run(tepo, case), tolerance=1e-12)


def test_tepos_mean_over_tokens_is_another_loss():
    """A = 1 on one token, A = -1 on three, s = 1: the mean over responses is 0, over tokens 2 / 4."""
    zeros = np.zeros((2, 3))
    mask = np.array([[True, False, False], [True, True, True]])
    case = Case(zeros, zeros, zeros, zeros, zeros, np.array([[1.0] * 3, [-1.0] * 3]), mask, np.zeros(2))
    assert run(build_preset("gspo"), case).loss == pytest.approx(0)
    assert run(build_preset("tepo_no_kl"), case).loss == pytest.approx(0.5)


def test_the_presets_say_what_the_paper_says():
    """arXiv 2507.18071: clips of 3e-4 and 4e-4, the mean over responses; two gradients."""
    options = {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}
    assert build_preset("gspo").model_dump() == options | {"ratio_gradient": "full"}
    assert build_preset("gspo_token").model_dump() == options | {"ratio_gradient": "stop_gradient"}
