"""Weights of tokens that a rollout engine drew from a distribution which is not quite the trainer's."""

import math
from dataclasses import replace

import pytest
import torch

from tepo_nemo.rollout.correction import RolloutCorrection

OFF = RolloutCorrection("none", truncation=2.0, icepop_low=0.5, icepop_high=5.0, response_gap_limit=None)
TRUNCATED, ICEPOP = replace(OFF, token_weight="truncated"), replace(OFF, token_weight="icepop")
# Ratios of old policy to engine, by hand.
RATIOS = torch.tensor([[0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 5.0, 8.0]], dtype=torch.float64)
ALL = torch.ones(1, 8, dtype=torch.bool)


def weights(correction: RolloutCorrection, gap: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    sampled = torch.full_like(gap, -3.0)
    return correction.weights(sampled + gap, sampled, mask)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (OFF, [1.0] * 8),
        (TRUNCATED, [0.25, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]),
        (replace(TRUNCATED, truncation=1.2), [0.25, 0.5, 1.0, 1.2, 1.2, 1.2, 1.2, 1.2]),
        (ICEPOP, [0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 5.0, 0.0]),
    ],
)
def test_closed_forms(correction: RolloutCorrection, expected: list[float]) -> None:
    """A nudge keeps the ratios 0.5 and 5 inside of IcePop's bounds, whatever rounding does."""
    gap = RATIOS.log() * (1 - 1e-12)
    torch.testing.assert_close(weights(correction, gap, ALL)[0], torch.tensor(expected, dtype=torch.float64))


def test_only_the_defaults_are_off() -> None:
    assert not OFF.is_on
    assert TRUNCATED.is_on and ICEPOP.is_on and replace(OFF, response_gap_limit=0.5).is_on


def test_a_response_is_dropped_whole_by_its_mean_gap() -> None:
    """Gaps of either sign: their mean is 0 in the first row, and its geometric ratio 1."""
    gap = torch.tensor([[0.6, -0.6, 0.6, -0.6], [0.3, -0.3, 0.3, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
    found = weights(replace(OFF, response_gap_limit=0.5), gap, mask)
    assert found.tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]


@pytest.mark.parametrize("limit", [0.012, 0.02])
def test_what_is_dropped_does_not_depend_on_length(limit: float) -> None:
    """Noise of 0.02 a token has a mean size of 0.016: none or all, at 256 tokens as at 8192. A band of
    0.1 % around the geometric mean would drop 43 % of the short ones and none of the long."""
    random = torch.Generator().manual_seed(1)
    for length in (256, 8192):
        gap = 0.02 * torch.randn(200, length, generator=random)
        kept = weights(replace(OFF, response_gap_limit=limit), gap, torch.ones_like(gap, dtype=torch.bool))
        assert bool(kept.any()) == bool(kept.all()) == (limit > 0.016), length
    short = 0.02 * torch.randn(2000, 256, generator=random)
    assert 0.35 < float((short.mean(-1).abs() > 1e-3).double().mean()) < 0.5


def test_both_at_once() -> None:
    gap = torch.tensor([[0.1, 2.0], [3.0, 3.0]], dtype=torch.float64)
    found = weights(replace(TRUNCATED, response_gap_limit=2.0), gap, torch.ones(2, 2, dtype=torch.bool))
    torch.testing.assert_close(found, torch.tensor([[math.exp(0.1), 2.0], [0.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("correction", [TRUNCATED, ICEPOP, replace(TRUNCATED, response_gap_limit=1.0)])
def test_masked_and_huge_gaps_stay_finite(correction: RolloutCorrection) -> None:
    old = torch.tensor([[-1.0, torch.nan, -500.0, -1.0]])
    sampled = torch.tensor([[-1.0, -1.0, -1.0, -torch.inf]])
    mask = torch.tensor([[True, False, True, True]])
    found = correction.weights(old, sampled, mask)
    assert found.isfinite().all() and found[0, 1] == 0 and (found >= 0).all()


def test_the_weight_has_no_gradient() -> None:
    old = torch.zeros(1, 3, requires_grad=True)
    assert not TRUNCATED.weights(
        old, torch.zeros(1, 3) - 0.5, torch.ones(1, 3, dtype=torch.bool)
    ).requires_grad
