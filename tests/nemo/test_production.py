"""Production mode (bf16 weights and activations, fp32 main weights in the distributed optimizer) at every layout.

Rounding to bf16 moves the gradients by a few per cent, so layouts cannot agree to 1e-5. What can be held: how far
one rank in bf16 is from fp32 measures the rounding; another layout rounds at other places, but neither more nor
differently, so that its distance from fp32, and that from one rank in bf16, are of that size. A forgotten
reduction or a wrong scale moves a gradient by tens of per cent.
"""

from collections.abc import Callable

import pytest
from support.layouts import REFERENCE, Outcome, assert_close, distances

Run = Callable[[str, bool], dict[str, Outcome]]

BF16_ROUNDING = 2.0**-8
both = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
layouts = pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "tp2_pp2"])


@both
def test_one_rank_is_fp32_but_for_rounding(run: Run, tied: bool) -> None:
    """Some tens of roundings in a row, of either sign: 8 is the root of 64."""
    bf16, fp32 = run(REFERENCE, tied)["production"], run(REFERENCE, tied)["distributed_adam"]
    assert bf16.losses["tepo"] == pytest.approx(fp32.losses["tepo"], rel=8 * BF16_ROUNDING)
    assert_close(bf16.before, fp32.before, BF16_ROUNDING / 2, "weights")
    found = distances(bf16.gradients["tepo"], fp32.gradients["tepo"])
    assert max(found.values()) < 8 * BF16_ROUNDING
    assert min(found.values()) > BF16_ROUNDING / 8, "this is to be bf16"


@both
@layouts
def test_gradients_are_those_of_one_rank_but_for_rounding(run: Run, layout: str, tied: bool) -> None:
    reference, fp32 = run(REFERENCE, tied)["production"], run(REFERENCE, tied)["distributed_adam"]
    spread = run(layout, tied)["production"]
    rounding = distances(reference.gradients["tepo"], fp32.gradients["tepo"])
    from_fp32 = distances(spread.gradients["tepo"], fp32.gradients["tepo"])
    from_reference = distances(spread.gradients["tepo"], reference.gradients["tepo"])
    for name, size in rounding.items():
        assert from_fp32[name] < 1.5 * size, name
        assert from_reference[name] < 1.5 * size, name
    loss_rounding = 8 * BF16_ROUNDING * abs(fp32.losses["tepo"])
    assert abs(spread.losses["tepo"] - reference.losses["tepo"]) < loss_rounding


@both
@layouts
def test_weights_after_three_updates(run: Run, layout: str, tied: bool) -> None:
    """Of the model as a whole: Adam makes steps of one size of gradients that are nothing but rounding."""
    reference, fp32 = run(REFERENCE, tied)["production"], run(REFERENCE, tied)["distributed_adam"]
    spread = run(layout, tied)["production"]
    rounding = _distance(reference, fp32)
    assert rounding < 0.3
    assert _distance(spread, fp32) < 1.5 * rounding
    assert _distance(spread, reference) < 1.5 * rounding
    assert spread.grad_norms == pytest.approx(reference.grad_norms, rel=8 * BF16_ROUNDING)


@pytest.mark.parametrize(
    ("layout", "tied"), [("pp2", False), ("dp2", False), ("dp2", True)], ids=["pp2-untied", "dp2-untied", "dp2-tied"]
)
def test_layouts_that_round_at_the_same_places_agree_closely(run: Run, layout: str, tied: bool) -> None:
    """Pipeline and data parallelism do the same arithmetic in bf16 and only add gradients up in fp32. (The two
    gradients of a tied embedding meet in bf16 on one stage, and in fp32 between two.)"""
    reference, spread = run(REFERENCE, tied)["production"], run(layout, tied)["production"]
    assert_close(spread.gradients["tepo"], reference.gradients["tepo"], 1e-5, "tepo")


def _distance(a: Outcome, b: Outcome) -> float:
    """||a - b|| / ||b|| of all changes of weights together."""
    pairs = [(a.change[name].double(), change.double()) for name, change in b.change.items()]
    difference = sum(float((actual - expected).square().sum()) for actual, expected in pairs)
    return (difference / sum(float(expected.square().sum()) for _, expected in pairs)) ** 0.5
