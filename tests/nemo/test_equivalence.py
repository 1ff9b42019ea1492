"""Loss, gradients and updates do not depend on how the work is spread over ranks and micro-batches (fp32)."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from support.layouts import (
    BF16,
    CLIP,
    FOR_SHORT_BATCHES,
    FP32,
    REFERENCE,
    SPREAD,
    Given,
    Outcome,
    assert_close,
)
from support.synthetic import RESPONSES_PER_UPDATE, Rows

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

Run = Callable[[str, bool], dict[str, Outcome]]


def _layouts(*also: str) -> pytest.MarkDecorator:
    pairs = [(layout, tied) for tied, layouts in SPREAD.items() for layout in (*also, *layouts)]
    ids = [f"{layout}-{'tied' if tied else 'untied'}" for layout, tied in pairs]
    return pytest.mark.parametrize(("layout", "tied"), pairs, ids=ids)


every_layout = _layouts()
also_the_reference = _layouts(REFERENCE)
both = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
optimizers = pytest.mark.parametrize("optimizer", FP32)


def expected_case(name: str) -> str:
    """The reference takes one micro-batch size."""
    return "tepo, micro-batch 4" if name.startswith("tepo") else name


@every_layout
def test_loss_and_gradients(run: Run, layout: str, tied: bool) -> None:
    """Every loss of every method, at micro-batch sizes of its own (faults 6, 7, 9, 24, 25)."""
    actual, expected = run(layout, tied)["sgd"], run(REFERENCE, tied)["sgd"]
    for name, loss in actual.losses.items():
        of_reference = expected_case(name)
        assert loss == pytest.approx(expected.losses[of_reference], rel=1e-5, abs=0), name
        if name != "all masked":
            assert_close(actual.gradients[name], expected.gradients[of_reference], 1e-5, name)


@both
def test_loss_and_gradients_of_micro_batches(run: Run, tied: bool) -> None:
    """Micro-batches of 1, 2 and 16 responses give what micro-batches of 4 give (fault 6)."""
    reference = run(REFERENCE, tied)["sgd"]
    for size in (1, 2, "of all"):
        name = f"tepo, micro-batch {size}"
        assert reference.losses[name] == pytest.approx(reference.losses["tepo, micro-batch 4"], rel=1e-5)
        assert_close(reference.gradients[name], reference.gradients["tepo, micro-batch 4"], 1e-5, name)


@also_the_reference
def test_nothing_to_train_on_gives_zero(run: Run, layout: str, tied: bool) -> None:
    """A mini-batch without a trained token: loss and gradients of 0, no NaN, on every rank (fault 9)."""
    outcome = run(layout, tied)["sgd"]
    assert outcome.losses["all masked"] == 0
    for name, gradient in outcome.gradients["all masked"].items():
        assert not gradient.any(), name


@every_layout
def test_gradients_of_the_distributed_optimizer(run: Run, layout: str, tied: bool) -> None:
    """Reduced and scattered by Megatron-core, gathered again here."""
    actual, expected = run(layout, tied)["distributed_adam"], run(REFERENCE, tied)["sgd"]
    assert actual.losses["tepo"] == pytest.approx(expected.losses["tepo, micro-batch 4"], rel=1e-5)
    assert_close(actual.gradients["tepo"], expected.gradients["tepo, micro-batch 4"], 1e-5, "tepo")


@optimizers
@every_layout
def test_weights_after_three_updates(run: Run, layout: str, tied: bool, optimizer: str) -> None:
    """Adam divides by the gradient's own size, and so enlarges what rounding did to small ones."""
    actual, expected = run(layout, tied)[optimizer], run(REFERENCE, tied)[optimizer]
    assert min(expected.grad_norms) > 2 * CLIP, "clipping is to be active"
    assert actual.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert_close(actual.before, expected.before, 0, "weights before")
    assert_close(
        actual.change, expected.change, 1e-4 if optimizer == "sgd" else 1e-2, "change of the weights"
    )


@both
def test_distributed_adam_is_adam(run: Run, tied: bool) -> None:
    reference = run(REFERENCE, tied)
    assert_close(
        reference["distributed_adam"].change, reference["adam"].change, 1e-3, "change of the weights"
    )


@optimizers
@also_the_reference
def test_the_gradient_norm_is_that_of_the_whole_model(
    run: Run, layout: str, tied: bool, optimizer: str
) -> None:
    """Each parameter counts once: neither replicas over ranks nor the copy of a tied embedding add to it."""
    outcomes = run(layout, tied)
    gradients = outcomes["sgd"].gradients["tepo, micro-batch 4"].values()
    whole = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    assert outcomes[optimizer].grad_norms[0] == pytest.approx(whole, rel=1e-5)


@every_layout
def test_statistics(run: Run, layout: str, tied: bool) -> None:
    """Log-probs and entropies before each update."""
    actual, expected = run(layout, tied)["sgd"].statistics, run(REFERENCE, tied)["sgd"].statistics
    for rows, of_reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(rows.logprobs, of_reference.logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(rows.entropy, of_reference.entropy, rtol=0, atol=1e-5)


@every_layout
def test_metrics_are_equal_on_every_rank(run: Run, layout: str, tied: bool) -> None:
    """On ranks without the loss, too (fault 23); and they are those of one rank."""
    for optimizer, outcome in run(layout, tied).items():
        for other in outcome.metrics[1:]:
            assert _equal(other, outcome.metrics[0]), optimizer
        if optimizer not in BF16:
            for case, metrics in run(REFERENCE, tied)[optimizer].metrics[0].items():
                actual = outcome.metrics[0][case]
                assert actual == pytest.approx(metrics, rel=1e-4, abs=1e-5, nan_ok=True), case


def _equal(a: dict[str, dict[str, float]], b: dict[str, dict[str, float]]) -> bool:
    """With NaN equal to NaN."""
    return repr(a) == repr(b)


def test_sequence_parallelism_and_recomputation_are_active(run: Run) -> None:
    """A rank's layers see half of the positions, and a layer under recomputation runs twice."""
    lengths = {
        layout: sorted(run(layout, False)["sgd"].layer_lengths["tepo, micro-batch 4"])
        for layout in (REFERENCE, "tp2", "tp2_sp", "pp2_recompute", "tp2_pp2_sp_recompute")
    }
    widths, halves = lengths[REFERENCE], lengths["tp2_sp"]
    assert len(widths) == len(halves) == 4 and len(set(widths)) > 1
    assert halves[-1] == math.ceil(widths[-1] / 2)
    assert lengths["tp2"] == widths
    assert lengths["pp2_recompute"] == sorted(widths * 2)
    assert lengths["tp2_pp2_sp_recompute"] == sorted(halves * 2)


@both
def test_no_decision_is_near_its_threshold(run: Run, given: Callable[[bool], Given], tied: bool) -> None:
    """Otherwise rounding would decide, and there would be nothing to compare; and all sides occur."""
    start = given(tied)
    for optimizer in FP32:
        for number, now in enumerate(run(REFERENCE, tied)[optimizer].statistics):
            rows = range(number * RESPONSES_PER_UPDATE, (number + 1) * RESPONSES_PER_UPDATE)
            decisions = _decisions(start, now, rows)
            assert _margin(decisions) > 1e-4, f"update {number} of {optimizer}"
            if number == 0:
                _assert_all_sides_occur(decisions)
                assert _margin_of_other_methods(decisions) > 1e-4


class Decision(NamedTuple):
    """What clip and mask look at, of one response; [|o|] each."""

    log_ratios: torch.Tensor
    drops: torch.Tensor  # old minus current entropy
    logprobs: torch.Tensor
    advantage: float

    @property
    def ratio(self) -> float:
        return float(self.log_ratios.mean().exp())


def _decisions(start: Given, now: Rows, rows: range) -> list[Decision]:
    return [
        Decision(
            (now.logprobs - start.old.logprobs)[row, :length].double(),
            (start.old.entropy - now.entropy)[row, :length].double(),
            now.logprobs[row, :length].double(),
            float(start.batch.advantages[row]),
        )
        for row in rows
        if (length := int(start.batch.response_lengths[row])) > 0
    ]


def _margin(decisions: Sequence[Decision]) -> float:
    """The smallest distance to a threshold of TEPO: of a response's ratio, or of a token's entropy drop."""
    clip = min(abs(decision.ratio - edge) for decision in decisions for edge in (0.8, 1.2))
    return min(clip, *(float(decision.drops.abs().min()) for decision in decisions))


def _margin_of_other_methods(decisions: Sequence[Decision]) -> float:
    """The same for the clips of token, response and window ratios, and for what covariances decide."""
    ratios = torch.cat([decision.log_ratios.exp() for decision in decisions])
    windows = torch.tensor([ratio for decision in decisions for ratio in _window_ratios(decision.log_ratios)])
    responses = torch.tensor([decision.ratio for decision in decisions])
    covariance = _covariances(decisions)
    interval = FOR_SHORT_BATCHES["clip_cov"]
    thresholds = [
        (ratios, (0.8, 1.2, 1.28, 2, 10)),  # GRPO, its kin and Clip-Cov
        (windows, (0.8, 1.2)),  # MPO
        (responses, (1 - 3e-4, 1 + 4e-4)),  # GSPO
        (covariance, (0, interval["covariance_low"], interval["covariance_high"])),
    ]
    margins = [float((values - edge).abs().min()) for values, edges in thresholds for edge in edges]
    # KL-Cov: the last covariance that is selected, and the first that is not.
    last = int(FOR_SHORT_BATCHES["kl_cov"]["selected_fraction"] * len(covariance))
    highest = covariance.sort(descending=True).values
    return min(*margins, float(highest[last - 1] - highest[last]))


def _covariances(decisions: Sequence[Decision]) -> torch.Tensor:
    """(A - mean A)(logp - mean logp) of all tokens."""
    advantages = torch.cat([torch.full_like(decision.logprobs, decision.advantage) for decision in decisions])
    logprobs = torch.cat([decision.logprobs for decision in decisions])
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def _window_ratios(log_ratios: torch.Tensor) -> list[float]:
    """MPO's, with K = 5, b_2 = 0.06 and lambda = 0.8."""
    weights = torch.tensor([1.0, *(0.06 * 0.8**k for k in range(4))], dtype=torch.float64)
    weights[0] -= weights[1:].sum()
    windows = [log_ratios[place : place + 5] for place in range(len(log_ratios))]
    return [
        float(((weights[: len(window)] * window).sum() / weights[: len(window)].sum()).exp())
        for window in windows
    ]


def _assert_all_sides_occur(decisions: Sequence[Decision]) -> None:
    sides = {
        (
            decision.advantage > 0,
            "above" if decision.ratio > 1.2 else "below" if decision.ratio < 0.8 else "between",
        )
        for decision in decisions
        if decision.advantage != 0
    }
    assert sides == {(positive, side) for positive in (True, False) for side in ("above", "below", "between")}
    assert any(decision.advantage == 0 for decision in decisions)
    covariance, of_clip = _covariances(decisions), FOR_SHORT_BATCHES["clip_cov"]
    candidates = (covariance > of_clip["covariance_low"]) & (covariance < of_clip["covariance_high"])
    assert candidates.sum() > int(of_clip["selected_fraction"] * len(covariance)) > 1
    drops = torch.cat([decision.drops for decision in decisions if decision.advantage > 0])
    assert (drops > 0).any() and (drops < 0).any()
