"""What must not change anything, in any method: micro-batches, padding, masked and empty responses."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from objectives.cases import (
    AGGREGATIONS,
    PRESETS,
    Case,
    assert_same,
    build_preset,
    group_tokens,
    make_case,
    run,
    totals,
)

tepo = partial(build_preset, "tepo")
grpo = partial(build_preset, "grpo")


# Terms that a preset has switched off are on here.
SWITCHED_ON = {
    "tepo": {"entropy_bonus": 0.1, "kl_mask": "all", "kl_coefficient": 0.5},
    "tepo_no_kl": {"ratio": "token"},
    "grpo": {"dual_clip": 3.0, "kl_coefficient": 0.5},
}


@pytest.fixture(params=sorted(path.stem for path in PRESETS.glob("*.yaml")))
def method(request):
    """Builds one of the shipped presets, with further options."""
    return lambda **options: build_preset(request.param, **(SWITCHED_ON.get(request.param, {}) | options))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_micro_batches_do_not_change_anything(parts, aggregation, method):
    """Faults 6, 37, T9: loss, gradients and metrics of 1, 2 and 4 micro-batches; of 8, some have no row."""
    case = make_case(21, 4, 6)
    objective = method(aggregation=aggregation)
    assert_same(run(objective, case, parts=parts), run(objective, case), tolerance=1e-12)


@pytest.mark.parametrize("parts", [2, 4])
def test_the_covariance_mask_compares_with_the_whole_mini_batch(parts):
    """Faults T9: means of the micro-batch would mask other tokens."""
    case = make_case(22, 4, 6)
    objective = tepo(entropy_drop="covariance", kl_coefficient=0.5)
    whole = run(objective, case)
    assert 0 < whole.metrics["mask/fraction"][0] < case.mask.sum()
    assert_same(run(objective, case, parts=parts), whole, tolerance=1e-12)


def test_a_response_needs_all_of_its_tokens():
    """Faults T3: log-ratios .4 .4 -.4 -.4 .1 give w = 1.02; the two pieces would give 1.49 and 0.79."""
    d = np.array([[0.4, 0.4, -0.4, -0.4, 0.1]])
    zeros, ones = np.zeros_like(d), np.ones_like(d)

    def mean_ratio(columns: slice) -> float:
        arrays = (d, zeros, zeros, zeros, zeros, ones, ones.astype(bool))
        part = Case(*(array[:, columns] for array in arrays), np.zeros(1))
        numerator, denominator = run(tepo(), part).metrics["ratio/mean"]
        return numerator / denominator

    assert mean_ratio(slice(None)) == pytest.approx(1.0202, abs=1e-4)
    assert mean_ratio(slice(0, 2)) == pytest.approx(1.4918, abs=1e-4)
    assert mean_ratio(slice(2, 5)) == pytest.approx(0.7919, abs=1e-4)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
def test_padding_is_invisible(junk, method):
    """Faults T4, 9: two tokens padded to eight columns with junk, the padding first, last and in between."""
    case = make_case(4, 3, 2, density=1.0)
    expected = run(method(), case)
    for columns in ([0, 1], [6, 7], [2, 5]):
        arrays = {name: np.full((3, 8), junk) for name in vars(case) if name not in ("mask", "groups")}
        for name, array in arrays.items():
            array[:, columns] = getattr(case, name)
        mask = np.zeros((3, 8), bool)
        mask[:, columns] = True
        padded = run(method(), Case(**arrays, mask=mask, groups=case.groups))
        assert padded.loss == pytest.approx(expected.loss, rel=1e-12)
        np.testing.assert_allclose(padded.logprob_gradient[:, columns], expected.logprob_gradient, rtol=1e-12)
        assert not padded.logprob_gradient[~mask].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("alone", [True, False])
def test_a_fully_masked_micro_batch_is_a_zero_on_the_graph(aggregation, alone, method):
    """Faults 9: alone in the mini-batch (every total 0) or beside others; `run` calls backward."""
    masked = make_case(6, 3, 4, density=0.0)
    objective = method(aggregation=aggregation)
    if alone:
        result = run(objective, masked)
        assert result.loss == 0
        assert not result.logprob_gradient.any() and not result.entropy_gradient.any()
    else:
        full = make_case(6, 3, 4, density=1.0)
        both = Case(
            **{name: np.concatenate([getattr(full, name), getattr(masked, name)]) for name in vars(full)}
        )
        together, expected = run(objective, both, parts=2), run(objective, full)
        assert together.loss == pytest.approx(expected.loss, rel=1e-12)
        assert not together.logprob_gradient[3:].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_empty_response_counts_nowhere(aggregation, method):
    """Faults 10: mask row 0 0 0, first, last or in the middle."""
    case = make_case(8, 3, 3, density=1.0)
    expected = run(method(aggregation=aggregation), case)
    for place in range(4):
        arrays = {name: np.insert(value, place, value[0], axis=0) for name, value in vars(case).items()}
        arrays["mask"][place] = False
        result = run(method(aggregation=aggregation), Case(**arrays))
        assert result.loss == pytest.approx(expected.loss, rel=1e-12)
        assert not result.logprob_gradient[place].any()


def test_a_truncated_response_is_in_neither_numerator_nor_denominator():
    """Faults 8: two responses of 4 tokens, one masked out for truncation; the denominator is 4."""
    case = make_case(9, 2, 4, spread=0.0, density=1.0)
    mask = np.array([[True] * 4, [False] * 4])
    case = replace(case, mask=mask, advantages=np.ones((2, 4)))
    assert totals(case).tokens == 4
    assert run(tepo(), case).loss == pytest.approx(-1.0)
    assert run(grpo(kl_coefficient=0.0), case).loss == pytest.approx(-1.0)


def test_two_groups_of_very_different_length():
    """Faults T7: A = 1 on the 2 tokens of one group, A = -1 on the 8 of the other, w = 1."""
    mask = np.array([[True] * 2 + [False] * 6, [True] * 8])
    advantages = np.array([[1.0] * 8, [-1.0] * 8])
    zeros = np.zeros((2, 8))
    case = Case(zeros, zeros, zeros, zeros, zeros, advantages, mask, np.array([7, 3]))
    np.testing.assert_array_equal(group_tokens(case), [2, 8])
    assert run(tepo(aggregation="token-mean"), case).loss == pytest.approx(-(2 - 8) / 10)
    assert run(tepo(aggregation="group-token-mean"), case).loss == pytest.approx(-(1 - 1) / 2)
