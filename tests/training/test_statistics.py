"""Statistics of old weights and of whole mini-batches, by hand on what the policy was given."""

import pytest
import torch
from support.tiny_run import WatchedPolicy, make_objective, make_run, world_group
from support.torch_policy import VOCAB_SIZE, TinyLM

TEMPERATURE = 0.7


def load(weights):
    model = TinyLM()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    return model


def trained_values(weights, mini_batch):
    """(row, advantage, log-prob under the given weights) of each trained token of this rank."""
    model, values = load(weights), []
    for micro in mini_batch.micro_batches:
        with torch.no_grad():
            logp = (model(micro.inputs)[..., :VOCAB_SIZE] / TEMPERATURE).log_softmax(-1)
        for place, row in enumerate(micro.rows.tolist()):
            for position in torch.nonzero(micro.mask[place]).flatten().tolist():
                target = micro.targets[place, position]
                advantage = micro.advantages[place, position].item()
                values.append((row, advantage, logp[place, position, target].item()))
    return values


def watched(rank, world_size, drop):
    """Per update: this rank's trained values and the statistics that the objective was given."""
    policy = WatchedPolicy(make_objective(entropy_drop=drop), temperature=TEMPERATURE, group=world_group())
    make_run(policy, max_steps=2, micro_batch_size=1).trainer.fit()
    updates = []
    for before, mini_batch, means in policy.updates:
        statistics = mini_batch.totals.statistics
        told = statistics and (statistics.advantage_mean.item(), statistics.logprob_mean.item())
        updates.append((trained_values(before, mini_batch), told, means["mask/fraction"]))
    return updates, policy.forward_passes


def check(ranks):
    """Means over the trained tokens of all ranks, under the weights before each update, not the old ones."""
    assert len(ranks[0]) == 4
    for updates in zip(*ranks, strict=True):
        values = [value for own, _, _ in updates for value in own]
        advantages, logprobs = [a for _, a, _ in values], [logp for _, _, logp in values]
        assert sum(a != 0 for a in advantages) > 10
        for _, told, _ in updates:
            assert told[0] == pytest.approx(sum(advantages) / len(values), abs=1e-6)
            assert told[1] == pytest.approx(sum(logprobs) / len(values), abs=1e-6)


def test_covariance_gets_the_means_of_the_whole_mini_batch():
    updates, forward_passes = watched(0, 1, "covariance")
    check([updates])
    assert forward_passes == 2 * (1 + 2)  # a step: the old statistics, and one more for each update


def test_the_mask_of_covariance_by_hand():
    updates, _ = watched(0, 1, "covariance")
    for values, _, fraction in updates:
        mean_a = sum(a for _, a, _ in values) / len(values)
        mean_logp = sum(logp for _, _, logp in values) / len(values)
        masked = [a > 0 and (a - mean_a) * (logp - mean_logp) > 0 for _, a, logp in values]
        assert fraction == pytest.approx(sum(masked) / len(masked))


def test_covariance_gets_the_same_means_on_every_rank(worlds):  # faults T9
    ranks = [updates for updates, _ in worlds(2).run(watched, "covariance")]
    check(ranks)
    # Each rank has its own part of the tokens: the means are not its own.
    assert not {row for row, _, _ in ranks[0][0][0]} & {row for row, _, _ in ranks[1][0][0]}


@pytest.mark.parametrize("drop", ["entropy", "surprisal"])
def test_who_does_not_ask_does_not_pay(drop):
    updates, forward_passes = watched(0, 1, drop)
    assert forward_passes == 2 and all(told is None for _, told, _ in updates)


def test_old_statistics_are_those_of_the_rollout_in_every_update():  # faults 36, 39, T8
    """Frozen when the step begins, though each update moves the weights."""
    policy = WatchedPolicy(make_objective(), temperature=TEMPERATURE)
    make_run(policy, max_steps=2, updates_per_rollout=4).trainer.fit()
    for step in (0, 1):
        updates = policy.updates[4 * step : 4 * step + 4]
        model = load(updates[0][0])
        # The first starts from those very weights.
        assert all(micro.old is None for micro in updates[0][1].micro_batches)
        for _, mini_batch, _ in updates[1:]:
            for micro in mini_batch.micro_batches:
                with torch.no_grad():
                    logp = (model(micro.inputs)[..., :VOCAB_SIZE] / TEMPERATURE).log_softmax(-1)
                expected = logp.gather(-1, micro.targets[..., None])[..., 0]
                entropy = -(logp.exp() * logp).sum(-1)
                torch.testing.assert_close(micro.old.logprobs[micro.mask], expected[micro.mask])
                torch.testing.assert_close(micro.old.entropy[micro.mask], entropy[micro.mask])
