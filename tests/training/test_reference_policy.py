"""The frozen reference policy in the loop: who has one, what it is, and who pays for it."""

import math

import pytest
import torch
from support.tiny_run import WatchedPolicy, make_objective, make_run
from support.torch_policy import VOCAB_SIZE, TinyLM

from tepo_nemo.runs.metrics import METRICS

TEMPERATURE = 0.7


class Counting(WatchedPolicy):
    """Remembers for how many mini-batches each pass under the reference was."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reference_passes = []

    def get_reference_logprobs(self, mini_batches):
        self.reference_passes.append(len(mini_batches))
        return super().get_reference_logprobs(mini_batches)


def trained_logprobs(weights, micro):
    model = TinyLM()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    with torch.no_grad():
        logp = (model(micro.inputs)[..., :VOCAB_SIZE] / TEMPERATURE).log_softmax(-1)
    return logp.gather(-1, micro.targets[..., None])[..., 0][micro.mask]


def test_the_kl_is_to_the_weights_that_the_run_started_from():
    """k3 by hand, before each of 3 x 2 updates, at the temperature of the rollouts."""
    policy = Counting(make_objective("grpo", kl_coefficient=0.1), temperature=TEMPERATURE)
    start = policy.weights()
    run = make_run(policy)
    run.trainer.fit()
    found = []
    for before, mini_batch, means in policy.updates:
        kl = []
        for micro in mini_batch.micro_batches:
            d = trained_logprobs(before, micro) - trained_logprobs(start, micro)
            kl += [math.exp(-x) + x - 1 for x in d.tolist()]
        assert means["kl/reference_mean"] == pytest.approx(sum(kl) / len(kl), abs=1e-6)
        found.append(means["kl/reference_mean"])
    assert found[0] == 0 and min(found[1:]) > 1e-4
    for row in run.recording.metrics:
        assert row.keys() == METRICS.keys() - {"rollout/weight_mean", "rollout/dropped_fraction"}
        assert row["time/reference_s"] > 0


def test_it_costs_one_pass_a_rollout():
    policy = Counting(make_objective("grpo", kl_coefficient=0.1))
    make_run(policy, updates_per_rollout=4).trainer.fit()
    assert policy.reference_passes == [4, 4, 4]
    assert policy.forward_passes == 3  # that of the old statistics, as without a reference
    for _, mini_batch, _ in policy.updates[::4]:  # the first updates still need no old statistics
        assert all(micro.old is None for micro in mini_batch.micro_batches)


@pytest.mark.parametrize("preset", ["tepo", "grpo", "dapo"])
def test_who_does_not_ask_does_not_pay(preset):
    policy = Counting(make_objective(preset))
    run = make_run(policy)
    run.trainer.fit()
    assert policy.reference_passes == [] and policy.forward_passes == 3
    for _, mini_batch, _ in policy.updates:
        assert all(micro.reference_logprobs is None for micro in mini_batch.micro_batches)
    assert all("time/reference_s" not in row for row in run.recording.metrics)
