"""At the weights that made the rollout every ratio is 1, to the bit; after an update none is."""

from collections.abc import Callable

import pytest
import torch
from support.layouts import BF16, LAYOUTS, REFERENCE, Given, Outcome, merge
from support.reference_model import response_statistics
from support.synthetic import RESPONSES_PER_UPDATE, Rows
from support.toy import ToyFolder
from support.updates import Case, Job, Updates, perform
from support.worlds import Worlds

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

TEMPERATURE = 0.6


@pytest.mark.parametrize("mode", ["sgd", "distributed_adam", *BF16])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", [REFERENCE, "tp2", "pp2", "dp2", "tp2_pp2"])
def test_first_update(
    run: Callable[[str, bool], dict[str, Outcome]], layout: str, tied: bool, mode: str
) -> None:
    """No token is masked, clipped or penalised: the old statistics are those of the same code, shapes and
    settings (faults 20, T1, T8). test_equivalence compares the gradients."""
    metrics = run(layout, tied)[mode].metrics[0]["at the old weights"]
    _assert_on_policy(metrics)


def _assert_on_policy(metrics: dict[str, float]) -> None:
    assert metrics["ratio/mean"] == 1
    assert metrics["entropy/mean"] > 0
    for name in ("ratio/clip_fraction", "kl/mean", "mask/fraction", "entropy/delta_mean"):
        assert metrics[name] == 0, name


@pytest.fixture(scope="module")
def outcomes(worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given]) -> dict[str, Outcome]:
    """Three updates at TP2 whose old statistics are the policy's own: as it is, in micro-batches of one, and
    at another temperature."""
    start = given(False)
    optimizer = ["trainer.optimizer.name=sgd", "trainer.optimizer.learning_rate=0.5"]
    plain = LAYOUTS["tp2"].config(toy, *start.overrides, *optimizer)
    cool = LAYOUTS["tp2"].config(toy, *start.overrides, *optimizer, f"rollout.temperature={TEMPERATURE}")
    cases = {
        f"micro-batch {size}": Case(start.batch, start.start, plain.algorithm, micro_batch_size=size)
        for size in (1, 4)
    }
    jobs = {
        "micro-batch 4": Job(plain, cases, Updates(start.batch, None)),
        "micro-batch 1": Job(plain, {}, Updates(start.batch, None, micro_batch_size=1)),
        "cool": Job(cool, {}, Updates(start.batch, None)),
    }
    reports = worlds(2, stack="nemo").run(perform, list(jobs.values()), timeout=110)
    return {
        name: merge(job, of_job)
        for (name, job), of_job in zip(jobs.items(), zip(*reports, strict=True), strict=True)
    }


@pytest.mark.parametrize("name", ["micro-batch 4", "micro-batch 1", "cool"])
def test_old_statistics_are_those_of_the_rollout(outcomes: dict[str, Outcome], name: str) -> None:
    """Frozen for all updates of a rollout: ratios are 1 in the first and move with the weights (fault 36)."""
    metrics = outcomes[name].metrics[0]
    _assert_on_policy(metrics["update 0"])
    for number in (1, 2):
        assert metrics[f"update {number}"]["ratio/mean"] != 1
        assert metrics[f"update {number}"]["kl/mean"] > 1e-3
    assert metrics["update 2"]["ratio/clip_fraction"] > 0


def test_later_ratios_are_against_the_first_weights(
    outcomes: dict[str, Outcome], given: Callable[[bool], Given]
) -> None:
    """From the statistics that were measured before each update."""
    start, outcome = given(False), outcomes["micro-batch 4"]
    for number, now in enumerate(outcome.statistics):
        total, count = 0.0, 0
        for row in range(number * RESPONSES_PER_UPDATE, (number + 1) * RESPONSES_PER_UPDATE):
            length = int(start.batch.response_lengths[row])
            if length > 0:
                d = (now.logprobs - start.start.logprobs)[row, :length].double()
                total, count = total + length * float(d.mean().exp()), count + length
        assert outcome.metrics[0][f"update {number}"]["ratio/mean"] == pytest.approx(total / count, rel=1e-5)


def test_forward_micro_batch_size_does_not_matter(outcomes: dict[str, Outcome]) -> None:
    """At TP2 (fault 21): the KL between micro-batches of 1, of 4, and TP1 in one go is 0."""
    ones, fours = outcomes["micro-batch 1"].statistics[0], outcomes["micro-batch 4"].statistics[0]
    torch.testing.assert_close(ones.logprobs, fours.logprobs, rtol=0, atol=5e-6)
    torch.testing.assert_close(ones.entropy, fours.entropy, rtol=0, atol=5e-6)
    for name in ("micro-batch 1", "micro-batch 4"):
        metrics = outcomes["micro-batch 4"].metrics[0][name]
        assert abs(metrics["kl/mean"]) < 1e-10, name  # half the square of a rounding error
        assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6), name


def test_temperature(outcomes: dict[str, Outcome], given: Callable[[bool], Given]) -> None:
    """Log-probs and entropies are taken at the sampling temperature (fault 17)."""
    start, actual = given(False), outcomes["cool"].statistics[0]
    expected = Rows(torch.zeros_like(actual.logprobs), torch.zeros_like(actual.entropy))
    for row in range(RESPONSES_PER_UPDATE):
        length = int(start.batch.response_lengths[row])
        logprobs, entropy = response_statistics(start.weights_in_float64, start.batch, row, TEMPERATURE)
        expected.logprobs[row, :length] = logprobs.detach()
        expected.entropy[row, :length] = entropy.detach()
    torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(actual.entropy, expected.entropy, rtol=0, atol=2e-5)
    warm = outcomes["micro-batch 4"].statistics[0].logprobs
    assert (actual.logprobs - warm).abs().max() > 0.5, "the temperature is to matter"
