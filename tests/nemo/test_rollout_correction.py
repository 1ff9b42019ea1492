"""The correction for a rollout engine in the host's loss, against float64 and from the paper's formulas."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.layouts import LAYOUTS, Given, assert_close, merge
from support.reference_model import response_statistics
from support.synthetic import RESPONSES_PER_UPDATE, first_rows
from support.toy import ToyFolder
from support.updates import Case, Job, perform
from support.worlds import Worlds

from tepo_nemo.training.batch import TrainBatch

pytestmark = pytest.mark.timeout(300)

CAP, LIMIT = 1.3, 0.35
CORRECTION = (
    "rollout.correction.token_weight=truncated",
    f"rollout.correction.truncation={CAP}",
    f"rollout.correction.response_gap_limit={LIMIT}",
)


@pytest.mark.parametrize("layout", ["tp2_pp2", "dp2"])
def test_loss_gradients_and_metrics(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given], layout: str
) -> None:
    """TEPO with its full gradient: each token has its own weight all the same."""
    start = given(False)
    batch, old = first_rows(start.batch, start.old, RESPONSES_PER_UPDATE)
    random = torch.Generator().manual_seed(4)
    noise = 0.4 * torch.randn(old.logprobs.shape, generator=random)
    batch = replace(batch, sampled_logprobs=old.logprobs - noise)
    config = LAYOUTS[layout].config(toy, *start.overrides, "trainer.optimizer.name=sgd", *CORRECTION)
    job = Job(config, {"it": Case(batch, old, config.algorithm)})
    reports = worlds(LAYOUTS[layout].ranks, stack="nemo").run(perform, [job], timeout=110)
    outcome = merge(job, [report[0] for report in reports])

    weights = start.weights_in_float64
    loss, metrics = written_out(weights, batch, old)
    loss.backward()
    gradients = {name: weight.grad for name, weight in weights.items()}
    assert outcome.losses["it"] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(outcome.gradients["it"], gradients, 1e-4, "it")
    for of_rank in outcome.metrics:
        for name, expected in metrics.items():
            assert of_rank["it"][name] == pytest.approx(expected, rel=1e-5), name
    assert 0.1 < metrics["rollout/dropped_fraction"] < 0.9, "some responses are to be dropped"


def written_out(
    weights: dict[str, torch.Tensor], batch: TrainBatch, old
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss in the stop-gradient form of the ratio, sg[w] pi / sg[pi], and the metrics."""
    terms, factors = [], []
    for row, length in enumerate(batch.response_lengths.tolist()):
        if length == 0:
            continue
        logp, entropy = response_statistics(weights, batch, row)
        old_logp, old_entropy = (part[row, :length].double() for part in (old.logprobs, old.entropy))
        gap = old_logp - batch.sampled_logprobs[row, :length].double()
        factor = gap.exp().clamp(max=CAP) * (gap.abs().mean() <= LIMIT)
        w = (logp - old_logp).mean().exp().detach() * (logp - logp.detach()).exp()
        advantage = float(batch.advantages[row])
        surrogate = torch.minimum(w * advantage, w.clamp(0.8, 1.2) * advantage)
        d = logp - old_logp
        masked = (entropy.detach() < old_entropy) & (advantage > 0)
        terms.append(-surrogate + 0.01 * ((-d).exp() + d - 1) * masked)
        factors.append(factor)
    factor, term = torch.cat(factors), torch.cat(terms)
    loss = (factor * term).sum() / len(term)
    metrics = {
        "rollout/weight_mean": float(factor.mean()),
        "rollout/dropped_fraction": float((factor == 0).double().mean()),
    }
    return loss, metrics
