"""KL-Cov against the float64 reference: which tokens are selected, and what they pay."""

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
    select,
    token_batch,
    totals,
)
from objectives.reference import Term, bounded_exp, covariance, kl, summed

from tepo_nemo.errors import UserError
from tepo_nemo.objectives import build

OPTIONS = {
    "selected_fraction": st.sampled_from([2e-4, 0.1, 0.5, 1.0]),
    "kl_coefficient": st.sampled_from([0.0, 0.1, 1.0]),
    "aggregation": st.sampled_from(AGGREGATIONS),
}


def selected_cells(case: Case, options: dict) -> set:
    """The tokens with the largest covariance, found one after the other; the earlier token among equals."""
    left, chosen = list(case.valid), set()
    while left and len(chosen) < max(1, int(options["selected_fraction"] * len(case.valid))):
        best = max(left, key=lambda cell: covariance(case, cell))  # the first of the largest
        left.remove(best)
        chosen.add(best)
    return chosen


def kl_cov_reference(case: Case, options: dict):
    """-A r token by token, plus coef |logp - logp_old| where the token is selected."""
    coefficient = options["kl_coefficient"]
    selected = selected_cells(case, options) if coefficient > 0 else set()

    def terms(cells):
        for n, cell in enumerate(cells):
            d = case.logprobs[cell] - case.old_logprobs[cell]
            ratio, slope = bounded_exp(d)
            penalty, by_logprob = kl(d, "abs")
            pays = cell in selected
            slopes = np.zeros(len(cells))
            slopes[n] = -case.advantages[cell] * slope + coefficient * by_logprob * pays
            yield Term(
                -case.advantages[cell] * ratio + coefficient * penalty * pays, slopes, ratio, masked=pays
            )

    return summed(case, terms, options["aggregation"], "abs")  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases(), options=st.fixed_dictionaries(OPTIONS))
def test_loss_gradients_and_metrics_match_the_formulas(case, options):
    assert_same(run(build("kl_cov", options), case), kl_cov_reference(case, options))


def test_numerical_derivative_in_float64():
    """The selection is a constant of the loss."""
    case = make_case(3, 4, 5, shaped=True)
    objective, counts = build_preset("kl_cov", selected_fraction=0.3), totals(case, statistics=True)
    selected = torch.tensor(select(objective, case, counts))

    def loss(logprobs):
        return objective(replace(token_batch(case), logprobs=logprobs, selected=selected), counts).loss

    assert torch.autograd.gradcheck(
        loss, torch.tensor(np.where(case.mask, case.logprobs, 0), requires_grad=True)
    )


@pytest.mark.parametrize(
    ("fraction", "selected"), [(0.002, [3]), (0.25, [3]), (0.5, [0, 3]), (0.99, [0, 1, 3]), (1.0, range(4))]
)
def test_four_tokens_by_hand(fraction, selected):
    """Cov = 4, 2, 0, 6 and every ratio e^0.1: the selected pay 0.1 each, over a denominator of 4."""
    logprobs = np.array([[-1.0], [-2.0], [-3.0], [-6.0]])
    advantages, zeros = np.array([[2.0], [2.0], [-2.0], [-2.0]]), np.zeros((4, 1))
    mask = np.ones((4, 1), bool)
    case = Case(logprobs, logprobs - 0.1, zeros, zeros, zeros, advantages, mask, np.arange(4))
    objective = build_preset("kl_cov", selected_fraction=fraction)
    assert np.flatnonzero(select(objective, case, totals(case, statistics=True))).tolist() == list(selected)
    result = run(objective, case)
    assert result.loss == pytest.approx(0.1 * len(selected) / 4)  # the advantages sum to 0
    assert result.metrics["mask/fraction"] == (len(selected), 4)
    np.testing.assert_allclose(result.metrics["kl/masked_mean"], (0.1 * len(selected), len(selected)))


def test_the_earlier_of_equal_tokens_pays():
    """A = 0 everywhere: every covariance is 0, and the first trained token of the first response is taken."""
    case = make_case(5, 3, 4)
    case = replace(case, advantages=np.zeros_like(case.advantages))
    selected = select(build_preset("kl_cov"), case, totals(case, statistics=True))
    assert [tuple(cell) for cell in np.argwhere(selected).tolist()] == [case.valid[0]]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(case=cases())
def test_without_its_penalty_it_is_grpo_without_any_clip(case):
    """The spec's identity: token-mean, no clip on either side, no dual clip."""
    objective = build_preset("kl_cov", kl_coefficient=0.0)
    assert not objective.needs_selection and not objective.needs_minibatch_statistics
    actual = run(objective, case)
    grpo = build_preset("grpo_dapo", clip_low=math.inf, clip_high=math.inf, dual_clip=None)
    expected = run(grpo, case)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(actual.logprob_gradient, expected.logprob_gradient, rtol=1e-12)


@pytest.mark.parametrize(
    "broken",
    [
        {"clip_high": 0.2},
        {"clip_low": 0.2},
        {"dual_clip": 1.1},
        {"aggregation": "seq-mean-token-mean"},
        {"kl_coefficient": 1.0},
    ],
)
def test_with_a_condition_broken_it_is_not(broken):
    case = make_case(17, 12, 6, spread=0.8)
    options = {"clip_low": math.inf, "clip_high": math.inf, "dual_clip": None}
    coefficient = broken.get("kl_coefficient", 0.0)
    rest = {key: value for key, value in broken.items() if key != "kl_coefficient"}
    actual = run(build_preset("kl_cov", kl_coefficient=coefficient), case)
    assert abs(actual.loss - run(build_preset("grpo_dapo", **(options | rest)), case).loss) > 1e-3


def test_it_asks_for_the_pass_and_the_selection():
    objective = build_preset("kl_cov")
    assert objective.needs_minibatch_statistics and objective.needs_selection
    assert not objective.needs_reference and not objective.needs_entropy_gradient


@pytest.mark.parametrize(("value", "said"), [(0.0, "greater than 0"), (1.5, "less than or equal to 1")])
def test_a_fraction_that_is_none_is_refused(value, said):
    with pytest.raises(UserError, match=rf"^algorithm.selected_fraction = {value}: it should be {said}$"):
        build_preset("kl_cov", selected_fraction=value)


def test_the_preset_says_what_the_public_script_says():
    assert preset("kl_cov") == {
        "selected_fraction": 0.002,
        "kl_coefficient": 1.0,
        "aggregation": "token-mean",
    }
