"""Advantages of tokens: what an objective is given of a rollout, and where its answer goes."""

import pytest
import torch
from support.tiny_run import WatchedPolicy, make_run, world_group
from support.torch_policy import VOCAB_SIZE, TinyLM

from tepo_nemo.objectives import ObjectiveOutput, RolloutTokens
from tepo_nemo.objectives.contract import Objective
from tepo_nemo.objectives.metrics import policy_metrics

TEMPERATURE = 0.7
SEEN: list[RolloutTokens] = []


class Shaping(Objective):
    """Gives every token an advantage of its own: 100 row + column."""

    reference: bool

    @property
    def needs_reference(self):
        return self.reference

    @property
    def shapes_advantages(self):
        return True

    def shape_advantages(self, rollout):
        SEEN.append(rollout)
        rows, columns = rollout.mask.shape
        return 100.0 * torch.arange(rows)[:, None] + torch.arange(columns)

    def __call__(self, tokens, totals):
        loss = -(tokens.advantages * tokens.logprobs).sum() / 1e4
        return ObjectiveOutput(loss, policy_metrics(tokens))


def watched(rank, world_size, reference, micro_batch_size):
    """Two steps of two updates: rollouts, what was given of them, and of each update the trained tokens."""
    SEEN.clear()
    policy = WatchedPolicy(Shaping(reference=reference), temperature=TEMPERATURE, group=world_group())
    run = make_run(policy, max_steps=2, micro_batch_size=micro_batch_size)
    run.trainer.fit()
    trained = [
        {
            (row, column): (int(target), float(advantage))
            for micro in mini_batch.micro_batches
            for place, row in enumerate(micro.rows.tolist())
            for column, (target, advantage) in enumerate(
                zip(
                    micro.targets[place][micro.mask[place]],
                    micro.advantages[place][micro.mask[place]],
                    strict=True,
                )
            )
        }
        for _, mini_batch, _ in policy.updates
    ]
    return run, list(SEEN), trained


def values_alone(weights, prompt, response):
    """Log-prob and entropy of each token of one response, unpadded."""
    model = TinyLM()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response[:-1]]))[0, len(prompt) - 1 :, :VOCAB_SIZE]
    logp = (logits / TEMPERATURE).log_softmax(-1)
    return logp[torch.arange(len(response)), response], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("reference", [False, True])
def test_the_whole_rollout_in_response_order(reference):
    """Old values under the weights of the rollout; a response without a verdict is masked as a whole."""
    run, seen, _ = watched(0, 1, reference, 3)
    start, failed = TinyLM(), 0
    start = torch.nn.utils.parameters_to_vector(start.parameters()).detach()
    for step, (given, kept) in enumerate(zip(seen, run.recording.kept, strict=True)):
        weights = run.policy.updates[2 * step][0]
        generation, groups = kept.rollouts.generation, kept.rollouts.groups
        assert torch.equal(given.groups, groups) and torch.equal(given.rewards, kept.rewards)
        assert torch.equal(given.advantages, run.recording.advantages[step])
        for row, valid in enumerate(kept.valid.tolist()):
            length = int(generation.lengths[row]) if valid else 0
            failed += not valid
            assert given.mask[row].tolist() == [n < length for n in range(generation.tokens.shape[1])]
            assert not given.old_logprobs[row, length:].any() and not given.old_entropy[row, length:].any()
            if length:
                prompt = kept.rollouts.prompts[groups[row]].tokens
                response = generation.tokens[row, :length].tolist()
                logp, entropy = values_alone(weights, prompt, response)
                torch.testing.assert_close(given.old_logprobs[row, :length], logp)
                torch.testing.assert_close(given.old_entropy[row, :length], entropy)
                if reference:
                    of_start, _ = values_alone(start, prompt, response)
                    torch.testing.assert_close(given.reference_logprobs[row, :length], of_start)
        if not reference:
            assert given.reference_logprobs is None
    assert failed > 0


def test_each_token_gets_its_own_advantage_once_a_rollout():
    run, seen, trained = watched(0, 1, False, 3)
    assert len(seen) == 2 and run.policy.forward_passes == 2  # a step: one pass over both mini-batches
    for number, tokens in enumerate(trained):
        kept = run.recording.kept[number // 2]
        rows = range(8) if number % 2 == 0 else range(8, 16)
        assert tokens == {
            (row, column): (int(kept.rollouts.generation.tokens[row, column]), 100.0 * row + column)
            for row in rows
            if kept.valid[row]
            for column in range(int(kept.rollouts.generation.lengths[row]))
        }


def test_the_first_update_has_old_statistics_of_its_own_weights():
    """Taken beforehand, where other objectives use those of its own forward; its ratio is 1 all the same."""
    run, _, _ = watched(0, 1, False, 3)
    for number, (_, mini_batch, means) in enumerate(run.policy.updates):
        assert all(micro.old is not None for micro in mini_batch.micro_batches)
        assert (means["ratio/mean"] == 1) == (number % 2 == 0)


def ranks_view(rank, world_size, micro_batch_size):
    _, seen, trained = watched(rank, world_size, True, micro_batch_size)
    return [vars(given) for given in seen], trained


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_every_rank_sees_the_whole_rollout(worlds, micro_batch_size):
    expected, all_tokens = ranks_view(0, 1, 2)
    ranks = worlds(2).run(ranks_view, micro_batch_size)
    for seen, _ in ranks:
        for given, of_one in zip(seen, expected, strict=True):
            for name, value in of_one.items():
                torch.testing.assert_close(given[name], value, rtol=1e-6, atol=1e-6, msg=name)
    for number, tokens in enumerate(all_tokens):
        first, second = (trained[number] for _, trained in ranks)
        assert first and second and not first.keys() & second.keys()
        assert first | second == tokens
