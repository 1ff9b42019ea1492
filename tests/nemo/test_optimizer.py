"""What a step does to the weights, and that it is not made with a gradient that is not finite."""

import math
from collections.abc import Callable

import pytest
import torch
from support.gather import whole
from support.layouts import CLIP, LAYOUTS, MODES, Given
from support.once import once
from support.steps import Recovery, Step, recover, same_weights, take_steps
from support.toy import VOCABULARY, ToyFolder
from support.worlds import Worlds
from torch import Tensor

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

LEARNING_RATE = 0.0625  # not the configured one
OPTIMIZERS = {
    "sgd": [*MODES["sgd"], "trainer.optimizer.gradient_clip=0"],
    "clipped sgd": [*MODES["sgd"], f"trainer.optimizer.gradient_clip={CLIP}"],
    "adam": [*MODES["adam"], "trainer.optimizer.gradient_clip=0"],
    "distributed_adam": [*MODES["distributed_adam"], "trainer.optimizer.gradient_clip=0"],
}


Recoveries = Callable[[str], dict[str, list[Recovery]]]
"""Of all ranks, by optimizer; the argument is a key of POISONED."""


@pytest.fixture(scope="module")
def steps(worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given]) -> dict[str, list[Step]]:
    """A step of each optimizer, of all ranks of TP2."""
    start = given(False)
    configs = [LAYOUTS["tp2"].config(toy, *start.overrides, *overrides) for overrides in OPTIMIZERS.values()]
    of_ranks = worlds(2, stack="nemo").run(
        take_steps, configs, start.batch, start.old, LEARNING_RATE, timeout=110
    )
    return dict(zip(OPTIMIZERS, map(list, zip(*of_ranks, strict=True)), strict=True))


def weights_and_gradients(
    steps: list[Step],
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights before, gradients, and weights after, of the whole model."""
    return tuple(
        whole([getattr(step, part) for step in steps], vocabulary=VOCABULARY, tied=False)
        for part in ("before", "gradients", "after")
    )


def test_sgd_moves_by_learning_rate_times_gradient(steps: dict[str, list[Step]]) -> None:
    """To the bit: the given learning rate, and no clipping where `gradient_clip` is 0."""
    before, gradients, after = weights_and_gradients(steps["sgd"])
    assert steps["sgd"][0].gradient.norm > 1
    for name, gradient in gradients.items():
        assert torch.equal(after[name], torch.add(before[name], gradient, alpha=-LEARNING_RATE)), name


def test_clipping_scales_the_gradient_of_the_whole_model(steps: dict[str, list[Step]]) -> None:
    """To a norm of `gradient_clip`; reported is the norm before."""
    before, gradients, after = weights_and_gradients(steps["clipped sgd"])
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    assert steps["clipped sgd"][0].gradient.norm == pytest.approx(norm, rel=1e-6)
    for name, gradient in gradients.items():
        expected = before[name].double() - LEARNING_RATE * CLIP / norm * gradient.double()
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", ["adam", "distributed_adam"])
def test_the_first_step_of_adam(steps: dict[str, list[Step]], mode: str) -> None:
    """With bias correction both moments are those of one gradient: g / (|g| + eps)."""
    before, gradients, after = weights_and_gradients(steps[mode])
    for name, gradient in gradients.items():
        g = gradient.double()
        expected = before[name].double() - LEARNING_RATE * g / (g.abs() + 1e-8)
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-6, atol=1e-7)


# What is put into an advantage of the last data-parallel rank, and the optimizers that must not take it.
POISONED = {
    "dp2-nan": ("dp2", math.nan, ["adam", "distributed_adam", "production"]),
    "dp2-inf": ("dp2", math.inf, ["adam", "distributed_adam", "production"]),
    "pp2-nan": ("pp2", math.nan, ["adam", "distributed_adam"]),
}


@pytest.fixture(scope="module")
def recoveries(worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given]) -> Recoveries:
    start = given(False)

    def work(name: str) -> dict[str, list[Recovery]]:
        layout, poison, modes = POISONED[name]
        configs = [LAYOUTS[layout].config(toy, *start.overrides, *MODES[mode]) for mode in modes]
        of_ranks = worlds(2, stack="nemo").run(recover, configs, start.batch, start.old, poison, timeout=110)
        return dict(zip(modes, zip(*of_ranks, strict=True), strict=True))

    return once(work)


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, (*_, modes) in POISONED.items() for mode in modes]
)
def test_a_gradient_that_is_not_finite_is_skipped(recoveries: Recoveries, name: str, mode: str) -> None:
    """By every rank, also where its own part is finite; weights and optimizer stay as they were."""
    for recovery in recoveries(name)[mode]:
        assert recovery.poisoned.gradient.not_finite == {"loss": 1, "norm": 0}  # first ranks
        assert not math.isfinite(recovery.poisoned.gradient.norm)
        assert same_weights(recovery.poisoned.after, recovery.poisoned.before)
        assert not recovery.clean.gradient.not_finite
        assert recovery.clean.gradient.norm == recovery.undisturbed.gradient.norm
        assert not same_weights(recovery.clean.after, recovery.clean.before)
        assert same_weights(recovery.clean.after, recovery.undisturbed.after)
