"""MPO against the float64 reference, its weights by hand, and its neighbours GRPO and TEPO."""

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
from tepo_nemo.objectives.mpo import window_ratio, window_weights

OPTIONS = {
    "window": st.sampled_from([1, 2, 3, 5, 9]),
    "next_weight": st.sampled_from([0.0, 0.06, 0.12]),
    "weight_decay": st.sampled_from([0.0, 0.8, 1.0]),
    "clip_low": st.sampled_from([0.0, 0.2, 1.0, math.inf]),
    "clip_high": st.sampled_from([0.0, 0.28, 1.0, math.inf]),
    "aggregation": st.sampled_from(AGGREGATIONS),
}


def mpo_reference(case: Case, options: dict):
    """The weights b of the tokens that are left in the window, scaled to 1; then PPO's clip."""
    weights = {
        k: options["next_weight"] * options["weight_decay"] ** (k - 2)
        for k in range(2, 1 + options["window"])
    }
    weights[1] = 1 - sum(weights.values())

    def terms(cells):
        d = [case.logprobs[cell] - case.old_logprobs[cell] for cell in cells]
        for n, cell in enumerate(cells):
            left = {k: b for k, b in weights.items() if n + k - 1 < len(cells)}
            scale = sum(left.values())
            ratio, ratio_slope = bounded_exp(sum(b / scale * d[n + k - 1] for k, b in left.items()))
            gain, slope, cut = surrogate(
                "ppo", ratio, case.advantages[cell], options["clip_low"], options["clip_high"]
            )
            slopes = np.zeros(len(cells))
            for k, b in left.items():
                slopes[n + k - 1] = -slope * ratio_slope * b / scale
            yield Term(-gain, slopes, ratio, cut)

    return summed(case, terms, options["aggregation"])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(case=cases(), options=st.fixed_dictionaries(OPTIONS))
def test_loss_gradients_and_metrics_match_the_formulas(case, options):
    """Masks have holes: the next token is the next trained one."""
    assert_same(run(build("mpo", options), case), mpo_reference(case, options))


@pytest.mark.parametrize("window", [1, 2, 5, 9])
def test_numerical_derivative_in_float64(window):
    case, objective = make_case(3, 4, 5, shaped=True), build_preset("mpo", window=window)

    def loss(logprobs):
        return objective(replace(token_batch(case), logprobs=logprobs), totals(case)).loss

    assert torch.autograd.gradcheck(
        loss, torch.tensor(np.where(case.mask, case.logprobs, 0), requires_grad=True)
    )


def test_the_shipped_weights_are_those_of_the_paper():
    options = preset("mpo")
    assert options == {
        "window": 5,
        "next_weight": 0.06,
        "weight_decay": 0.8,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token-mean",
    }
    weights = window_weights(5, options["next_weight"], options["weight_decay"])
    assert weights == pytest.approx([0.82288, 0.06, 0.048, 0.0384, 0.03072])
    assert sum(weights) == pytest.approx(1)


def test_windows_by_hand():
    """Weights 0.7, 0.2, 0.1 over d = 1, 2, 4, 8 between masked positions; the last two windows are scaled."""
    d = np.array([[math.nan, 1.0, 2.0, math.nan, 4.0, 8.0, math.inf]])
    mask = np.isfinite(d)
    case = Case(np.where(mask, d / 10, d), *np.zeros((5, *d.shape)), mask, np.zeros(1))
    ratio = window_ratio(token_batch(case), [0.7, 0.2, 0.1])[0]
    expected = [1, 0.07 + 0.04 + 0.04, 0.14 + 0.08 + 0.08, 1, (0.28 + 0.16) / 0.9, 0.8, 1]
    expected = [math.exp(x) if inside else 1 for x, inside in zip(expected, mask[0], strict=True)]
    assert ratio.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "ratio", "cut"),
    [
        (1.0, 0.5, 1.2, True),
        (1.0, -0.5, math.exp(-0.5), False),
        (-1.0, 0.5, math.exp(0.5), False),
        (-1.0, -0.5, 0.8, True),
    ],
)
def test_the_clip_on_either_side(advantage, log_ratio, ratio, cut):
    """Eight tokens of one log-ratio: every window has it, the scaled ones at the end too."""
    zeros = np.zeros((1, 8))
    case = Case(zeros + log_ratio, *np.zeros((4, 1, 8)), zeros + advantage, zeros == 0, np.zeros(1))
    result = run(build_preset("mpo"), case)
    assert result.loss == pytest.approx(-advantage * ratio, rel=1e-12)
    assert result.logprob_gradient.sum() == pytest.approx(0 if cut else -advantage * ratio, rel=1e-12)
    assert result.metrics["ratio/clip_fraction"] == (8 * cut, 8)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(case=cases(), low=OPTIONS["clip_low"], high=OPTIONS["clip_high"])
def test_a_window_of_one_is_grpo(case, low, high):
    clip = {"clip_low": low, "clip_high": high}
    grpo = build_preset("grpo", aggregation="token-mean", **clip)
    assert_same(run(build_preset("mpo", window=1, **clip), case), run(grpo, case), tolerance=1e-12)


def test_a_longer_window_is_not():
    case = make_case(3, 4, 5)
    wide, narrow = (run(build_preset("mpo", window=window), case) for window in (5, 1))
    assert wide.loss != pytest.approx(narrow.loss, rel=1e-6)


def test_equal_weights_over_the_whole_response_give_tepos_ratio_to_its_first_token():
    case = make_case(7, 1, 6, density=1.0)
    ratio = window_ratio(token_batch(case), window_weights(6, 1 / 6, 1.0))[0]
    expected = math.exp((case.logprobs - case.old_logprobs).mean())
    assert ratio[0].item() == pytest.approx(expected, rel=1e-12)
    assert ratio[-1].item() == pytest.approx(math.exp(case.logprobs[0, -1] - case.old_logprobs[0, -1]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"window": 0}, r"^algorithm.window = 0: it should be greater than or equal to 1$"),
        ({"window": 2.5}, r"^algorithm.window = 2.5: it should be a valid integer"),
        ({"next_weight": -0.1}, r"^algorithm.next_weight = -0.1: it should be greater than or equal to 0$"),
        (
            {"next_weight": 0.5},
            r"^algorithm.weight_decay = 0.8: leaves the token itself a weight of -0.476, which must be",
        ),
        ({"window": 3, "next_weight": 0.5, "weight_decay": 1.0}, r"a weight of 0, which must be above 0"),
    ],
)
def test_weights_that_are_none_are_refused(options, said):
    with pytest.raises(UserError, match=said):
        build_preset("mpo", **options)
