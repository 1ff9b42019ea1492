"""Clip-Cov against the float64 reference: which tokens are selected, and what becomes of them."""

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
from objectives.reference import Term, bounded_exp, covariance, summed, surrogate

from tepo_nemo.errors import UserError
from tepo_nemo.objectives import build

OPTIONS = {
    "selected_fraction": st.sampled_from([2e-4, 0.1, 0.5, 1.0]),
    "covariance_low": st.sampled_from([-1.0, 0.0, 0.3]),
    "covariance_high": st.sampled_from([0.5, 1.5, 5.0]),
    "clip_low": st.sampled_from([0.0, 0.2, 1.0, math.inf]),
    "clip_high": st.sampled_from([0.0, 0.28, 1.0, math.inf]),
    "aggregation": st.sampled_from(AGGREGATIONS),
}


def token_surrogate(case: Case, cell, options: dict):
    """Value, derivative by the log-probability, ratio, and whether the clip cut it."""
    ratio, slope = bounded_exp(case.logprobs[cell] - case.old_logprobs[cell])
    gain, by_ratio, cut = surrogate(
        "ppo", ratio, case.advantages[cell], options["clip_low"], options["clip_high"]
    )
    return gain, by_ratio * slope, ratio, cut


def selected_cells(case: Case, options: dict) -> set:
    """The candidates with the largest draws, found one after the other; the earlier token among equals."""
    candidates = [
        cell
        for cell in case.valid
        if options["covariance_low"] < covariance(case, cell) < options["covariance_high"]
        and not token_surrogate(case, cell, options)[3]
    ]
    wanted = max(1, int(options["selected_fraction"] * len(case.valid)))
    chosen = set()
    while candidates and len(chosen) < wanted:
        best = max(candidates, key=lambda cell: case.draws[cell])  # the first of the largest
        candidates.remove(best)
        chosen.add(best)
    return chosen


def clip_cov_reference(case: Case, options: dict):
    """GRPO's clipped loss token by token, 0 where the token is selected."""
    selected = selected_cells(case, options)

    def terms(cells):
        for n, cell in enumerate(cells):
            gain, slope, ratio, cut = token_surrogate(case, cell, options)
            slopes = np.zeros(len(cells))
            if cell in selected:
                yield Term(0.0, slopes, ratio, bool(case.advantages[cell] != 0))
            else:
                slopes[n] = -slope
                yield Term(-gain, slopes, ratio, cut)

    return summed(case, terms, options["aggregation"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases(), options=st.fixed_dictionaries(OPTIONS))
def test_loss_gradients_and_metrics_match_the_formulas(case, options):
    assert_same(run(build("clip_cov", options), case), clip_cov_reference(case, options))


def test_numerical_derivative_in_float64():
    """The selection is a constant of the loss."""
    case = make_case(3, 4, 5, shaped=True, spread=0.5)
    objective = build_preset("clip_cov", covariance_low=0.1, selected_fraction=0.3)
    counts = totals(case, statistics=True)
    selected = torch.tensor(select(objective, case, counts))
    assert selected.any() and (~selected & torch.tensor(case.mask)).any()

    def loss(logprobs):
        return objective(replace(token_batch(case), logprobs=logprobs, selected=selected), counts).loss

    assert torch.autograd.gradcheck(
        loss, torch.tensor(np.where(case.mask, case.logprobs, 0), requires_grad=True)
    )


def by_hand(draws, logprobs=(-1.0, -2.0, -3.0, -6.0), advantages=(2.0, 2.0, -2.0, -2.0)) -> Case:
    """Four responses of one token; mean A = 0, mean logp = -3, Cov = 4, 2, 0, 6."""

    def column(values) -> np.ndarray:
        return np.array(values, dtype=float)[:, None]

    logprobs, zeros = column(logprobs), np.zeros((4, 1))
    mask = np.ones((4, 1), bool)
    return Case(
        logprobs, logprobs, zeros, zeros, zeros, column(advantages), mask, np.arange(4), column(draws)
    )


@pytest.mark.parametrize(
    ("draws", "fraction", "selected"),
    [
        ((0.1, 0.2, 0.9, 0.9), 0.25, [1]),  # 1 of 4: of the candidates 0 and 1 the larger draw
        ((0.3, 0.2, 0.9, 0.9), 0.25, [0]),
        ((0.3, 0.3, 0.9, 0.9), 0.25, [0]),  # a tie
        ((0.3, 0.2, 0.9, 0.9), 2e-4, [0]),  # at least one
        ((0.3, 0.2, 0.9, 0.9), 0.74, [0, 1]),  # int(2.96) = 2
        ((0.3, 0.2, 0.9, 0.9), 1.0, [0, 1]),  # no more than there are candidates
    ],
)
def test_the_selection_by_hand(draws, fraction, selected):
    """1 < Cov < 5 holds for the first two. They keep their place in the denominator of 4."""
    case = by_hand(draws)
    objective = build_preset("clip_cov", selected_fraction=fraction)
    assert np.flatnonzero(select(objective, case, totals(case, statistics=True))).tolist() == selected
    result = run(objective, case)
    rest = [cell for cell in range(4) if cell not in selected]
    assert result.loss == pytest.approx(-sum(case.advantages[cell, 0] for cell in rest) / 4)
    assert np.flatnonzero(result.logprob_gradient).tolist() == rest
    assert result.metrics["ratio/clip_fraction"] == (len(selected), 4)


def test_what_the_clip_touches_is_no_candidate():
    """The token with the larger draw has the ratio 2.5, beyond the clip at 2: the other one is selected."""
    case = by_hand((0.9, 0.2, 0.9, 0.9))
    case = replace(case, old_logprobs=case.logprobs - np.array([[math.log(2.5)], [0], [0], [0]]))
    objective, counts = build_preset("clip_cov"), totals(case, statistics=True)
    assert np.flatnonzero(select(objective, case, counts)).tolist() == [1]
    wider = build_preset("clip_cov", clip_high=2.0)
    assert np.flatnonzero(select(wider, case, counts)).tolist() == [0]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(case=cases())
def test_without_candidates_it_is_grpo_with_that_clip(case):
    """No dual clip, the mean over tokens; no covariance is beyond 1e6 and finite."""
    without = run(build_preset("clip_cov", covariance_low=1e6, covariance_high=1e7), case)
    grpo = build_preset("grpo_dapo", clip_low=1.0, clip_high=1.0, dual_clip=None)
    assert_same(without, run(grpo, case), tolerance=1e-12)


def test_with_candidates_it_is_not():
    case = by_hand((0.1, 0.2, 0.3, 0.4))
    grpo = build_preset("grpo_dapo", clip_low=1.0, clip_high=1.0, dual_clip=None)
    assert run(build_preset("clip_cov"), case).loss != run(grpo, case).loss


def test_it_asks_for_the_pass_and_the_selection():
    objective = build_preset("clip_cov")
    assert objective.needs_minibatch_statistics and objective.needs_selection
    assert not objective.needs_reference and not objective.needs_entropy_gradient


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("covariance_high", 1.0, "it should be greater than covariance_low = 1.0"),
        ("covariance_high", math.inf, "it should be a finite number"),
        ("selected_fraction", 0.0, "it should be greater than 0"),
        ("selected_fraction", 1.1, "it should be less than or equal to 1"),
    ],
)
def test_an_option_that_selects_nothing_is_refused(option, value, said):
    with pytest.raises(UserError) as error:
        build_preset("clip_cov", **{option: value})
    assert str(error.value) == f"algorithm.{option} = {value}: {said}"


def test_the_preset_says_what_the_public_script_says():
    assert preset("clip_cov") == {
        "selected_fraction": 2e-4,
        "covariance_low": 1.0,
        "covariance_high": 5.0,
        "clip_low": 1.0,
        "clip_high": 1.0,
        "aggregation": "token-mean",
    }
