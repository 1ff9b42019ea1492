"""GPG against the float64 reference: a plain policy gradient."""

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
from objectives.reference import Term, bounded_exp, summed

from tepo_nemo.objectives import group_advantages


def gpg_reference(case: Case, aggregation: str):
    """-A logp and its derivative -A; of the ratio, which it does not use, the metrics report the token's."""

    def terms(cells):
        for n, cell in enumerate(cells):
            slopes = np.zeros(len(cells))
            slopes[n] = -case.advantages[cell]
            ratio, _ = bounded_exp(case.logprobs[cell] - case.old_logprobs[cell])
            yield Term(-case.advantages[cell] * case.logprobs[cell], slopes, ratio)

    return summed(case, terms, aggregation)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(case=cases(), aggregation=st.sampled_from(AGGREGATIONS))
def test_loss_gradients_and_metrics_match_the_formulas(case, aggregation):
    assert_same(run(build_preset("gpg", aggregation=aggregation), case), gpg_reference(case, aggregation))


def test_numerical_derivative_in_float64():
    case, objective = make_case(3, 4, 5, shaped=True), build_preset("gpg")

    def loss(logprobs):
        return objective(replace(token_batch(case), logprobs=logprobs), totals(case)).loss

    assert torch.autograd.gradcheck(
        loss, torch.tensor(np.where(case.mask, case.logprobs, 0), requires_grad=True)
    )


@pytest.mark.parametrize("advantage", [0.5, -0.5])
def test_three_tokens_by_hand(advantage):
    """Two responses of logp -1, -3 and -2, one advantage: -A (-6) / 3, and -A / 3 for each token."""
    logprobs, mask = np.array([[-1.0, -3.0], [-2.0, -9.0]]), np.array([[True, True], [True, False]])
    zeros = np.zeros((2, 2))
    case = Case(logprobs, zeros, zeros, zeros, zeros, zeros + advantage, mask, np.zeros(2))
    result = run(build_preset("gpg"), case)
    assert result.loss == pytest.approx(2 * advantage)
    np.testing.assert_allclose(result.logprob_gradient, np.where(mask, -advantage / 3, 0))
    assert result.metrics["ratio/clip_fraction"] == (0, 3)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(case=cases())
def test_its_gradient_is_that_of_the_ratio_none(case):
    """pi / sg[pi] has the value 1, which no clip cuts, and the gradient of logp (Panel C)."""
    panel = run(build_preset("tepo_no_kl", ratio="none"), case)
    np.testing.assert_allclose(
        run(build_preset("gpg"), case).logprob_gradient, panel.logprob_gradient, rtol=1e-12
    )


def test_the_old_policy_does_not_enter_the_loss():
    case = make_case(4, 4, 5)
    moved = replace(case, old_logprobs=case.old_logprobs - 3)
    first, second = (run(build_preset("gpg"), each) for each in (case, moved))
    assert first.loss == second.loss
    np.testing.assert_array_equal(first.logprob_gradient, second.logprob_gradient)


def test_alpha_makes_up_for_groups_without_spread():
    """The gradient over 2 groups, one of them without spread, is that of the other alone with alpha = 1."""
    rewards, ids = torch.tensor([1.0, 1, 1, 0]), torch.tensor([0, 0, 1, 1])
    valid = torch.ones(4, dtype=torch.bool)
    advantages = group_advantages(rewards, ids, valid, "gpg").double().numpy()
    case = make_case(8, 4, 3, density=1.0)
    case = replace(case, advantages=np.broadcast_to(advantages[:, None], (4, 3)))
    both, alone = run(build_preset("gpg"), case), run(build_preset("gpg"), case.rows(slice(2, 4)))
    assert advantages.tolist() == [0, 0, 1, -1]
    np.testing.assert_allclose(both.logprob_gradient[2:], alone.logprob_gradient / 2, rtol=1e-12)
    np.testing.assert_allclose(both.logprob_gradient[2:, 0], [-1 / 12, 1 / 12], rtol=1e-12)
