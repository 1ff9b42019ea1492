"""The bf16 modes at every layout: production mode (bf16 weights, with fp32 main weights in the distributed
optimizer), and autocasting from fp32 weights.

Rounding to bf16 moves the gradients by a few per cent, so layouts cannot agree to 1e-5. What can be held: how
far one rank in bf16 is from fp32 measures the rounding. Another layout rounds at other places, but neither
more nor differently, so that its distances from fp32 and from one rank in bf16 are less than twice that.
A forgotten reduction or a wrong scale moves a gradient by tens of per cent.
"""

from collections.abc import Callable

import pytest
from support.layouts import BF16, LAYOUTS, REFERENCE, SPREAD, Outcome, assert_close, distances, works

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

Run = Callable[[str, bool], dict[str, Outcome]]

ROUNDING = 2.0**-8
IN_FP32 = {"production": "distributed_adam", "autocast": "adam"}
BOTH = {False: "untied", True: "tied"}
both = pytest.mark.parametrize("tied", BOTH, ids=BOTH.values())
every = [
    (mode, layout, tied)
    for mode in BF16
    for tied, layouts in SPREAD.items()
    for layout in layouts
    if works(mode, LAYOUTS[layout])
]
every_layout = pytest.mark.parametrize(
    ("mode", "layout", "tied"), every, ids=[f"{mode}-{layout}-{BOTH[tied]}" for mode, layout, tied in every]
)


@both
@pytest.mark.parametrize("mode", BF16)
def test_one_rank_is_fp32_but_for_rounding(run: Run, tied: bool, mode: str) -> None:
    """Some tens of roundings in a row, of either sign: 8 is the root of 64."""
    reference = run(REFERENCE, tied)
    bf16, fp32 = reference[mode], reference[IN_FP32[mode]]
    assert_close(bf16.before, fp32.before, ROUNDING / 2 if mode == "production" else 0, "weights")
    assert bf16.losses["tepo"] == pytest.approx(
        reference["distributed_adam"].losses["tepo"], rel=8 * ROUNDING
    )
    found = distances(bf16.gradients["tepo"], reference["distributed_adam"].gradients["tepo"])
    assert max(found.values()) < 8 * ROUNDING
    assert min(found.values()) > ROUNDING / 8, "this is to be bf16"


@every_layout
def test_gradients_are_those_of_one_rank_but_for_rounding(
    run: Run, layout: str, tied: bool, mode: str
) -> None:
    spread, reference = run(layout, tied)[mode], run(REFERENCE, tied)[mode]
    fp32 = run(REFERENCE, tied)["distributed_adam"]
    rounding = distances(reference.gradients["tepo"], fp32.gradients["tepo"])
    from_fp32 = distances(spread.gradients["tepo"], fp32.gradients["tepo"])
    from_reference = distances(spread.gradients["tepo"], reference.gradients["tepo"])
    for name, size in rounding.items():
        assert from_fp32[name] < 2 * size, name
        assert from_reference[name] < 2 * size, name
    assert spread.losses["tepo"] == pytest.approx(reference.losses["tepo"], rel=8 * ROUNDING)


@every_layout
def test_weights_after_three_updates(run: Run, layout: str, tied: bool, mode: str) -> None:
    """Of the model as a whole: Adam makes steps of one size of gradients that are nothing but rounding."""
    spread, reference = run(layout, tied)[mode], run(REFERENCE, tied)[mode]
    fp32 = run(REFERENCE, tied)[IN_FP32[mode]]
    rounding = _distance(reference, fp32)
    assert rounding < 0.3
    assert _distance(spread, fp32) < 2 * rounding
    assert _distance(spread, reference) < 2 * rounding
    assert spread.grad_norms == pytest.approx(reference.grad_norms, rel=8 * ROUNDING)


@pytest.mark.parametrize("mode", BF16)
def test_pipeline_stages_round_at_the_same_places(run: Run, mode: str) -> None:
    """They do the same arithmetic in bf16 on the same micro-batches. (Data-parallel ranks have others; the
    gradients of a tied embedding meet in bf16 on one stage, and in fp32 between two.)"""
    spread, reference = run("pp2", False)[mode], run(REFERENCE, False)[mode]
    assert_close(spread.gradients["tepo"], reference.gradients["tepo"], 1e-5, "tepo")


def _distance(a: Outcome, b: Outcome) -> float:
    """||a - b|| / ||b|| of all changes of weights together."""
    pairs = [(a.change[name].double(), change.double()) for name, change in b.change.items()]
    difference = sum(float((actual - expected).square().sum()) for actual, expected in pairs)
    return (difference / sum(float(expected.square().sum()) for _, expected in pairs)) ** 0.5
