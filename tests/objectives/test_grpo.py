"""GRPO against the float64 reference, and the forms it takes in its neighbours."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.cases import AGGREGATIONS, assert_same, cases, make_case, preset, run, token_batch, totals
from objectives.reference import reference

from tepo_nemo.objectives import build

OPTIONS = {
    "clip_low": st.sampled_from([0.0, 0.2, 1.0, float("inf")]),
    "clip_high": st.sampled_from([0.0, 0.28, 1.0, float("inf")]),
    "dual_clip": st.sampled_from([None, 1.1, 3.0, 10.0]),
    "kl_estimator": st.sampled_from(["k1", "k2", "k3", "abs"]),
    "kl_coefficient": st.sampled_from([0.0, 0.04, 1.0]),
    "aggregation": st.sampled_from(AGGREGATIONS),
}


def grpo(**options):
    return build("grpo", preset("grpo") | options)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(case=cases(), options=st.fixed_dictionaries(OPTIONS))
def test_loss_gradients_and_metrics_match_the_formulas(case, options):
    assert_same(run(build("grpo", options), case), reference(case, options))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_numerical_derivative_in_float64(estimator):
    case = make_case(3, 4, 5)
    objective = grpo(kl_estimator=estimator, kl_coefficient=0.5)

    def loss(logprobs):
        return objective(replace(token_batch(case), logprobs=logprobs), totals(case)).loss

    logprobs = torch.tensor(np.where(case.mask, case.logprobs, 0), requires_grad=True)
    assert torch.autograd.gradcheck(loss, logprobs)


@pytest.mark.parametrize(("name", "coefficient"), [("grpo", 0.04), ("grpo_dapo", 0.0)])
def test_production_precision_stays_within_float32_rounding(name, coefficient):
    case, options = make_case(13, 8, 12), preset(name) | {"kl_coefficient": coefficient}
    assert_same(run(build("grpo", options), case, dtype=torch.float32), reference(case, options), 2e-6)


def test_the_dapo_baseline_is_tepo_with_the_token_ratio_and_no_kl():
    """While no ratio of a negative advantage is beyond the dual clip, the two baselines are one loss."""
    case = make_case(14, 5, 6)
    expected = run(build("tepo", preset("tepo_no_kl") | {"ratio": "token"}), case)
    actual = run(build("grpo", preset("grpo_dapo")), case)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-12)
    np.testing.assert_allclose(actual.logprob_gradient, expected.logprob_gradient, rtol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_reference_equal_to_the_policy_changes_nothing(estimator):
    """Faults 21, T2: KL and its gradient are 0 there, for every estimator."""
    case = make_case(15, 4, 5)
    case = replace(case, reference_logprobs=case.logprobs)
    with_kl = run(grpo(kl_estimator=estimator, kl_coefficient=1.0), case)
    without = run(grpo(kl_coefficient=0.0), case)
    assert with_kl.loss == without.loss
    assert with_kl.metrics["kl/reference_mean"][0] == 0
    np.testing.assert_array_equal(with_kl.logprob_gradient, without.logprob_gradient)


def test_the_reference_is_needed_only_for_its_kl():
    assert grpo(kl_coefficient=0.04).needs_reference
    assert not grpo(kl_coefficient=0.0).needs_reference
    case = make_case(16, 3, 4)
    without = replace(token_batch(case), reference_logprobs=None)
    assert grpo(kl_coefficient=0.0)(without, totals(case)).loss.isfinite()
    with pytest.raises(AssertionError, match="reference"):
        grpo(kl_coefficient=0.04)(without, totals(case))
