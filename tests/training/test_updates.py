"""The updates of a run against TEPO's formula written out, and against themselves under every split."""

import math

import pytest
import torch
from support.tiny_run import WatchedPolicy, make_objective, make_run, world_group
from support.torch_policy import VOCAB_SIZE, TinyLM, TorchPolicy

from tepo_nemo.reward.result import RewardResult
from tepo_nemo.training import minibatch

TEMPERATURE, LEARNING_RATE, BETA, CLIP = 0.7, 0.3, 0.4, 0.2


# --- the formula ---------------------------------------------------------------------------------


def token_values(model, prompt, response):
    """Log-prob and entropy of each token of one response, unpadded and alone."""
    logits = model(torch.tensor([prompt + response[:-1]]))[0, len(prompt) - 1 :, :VOCAB_SIZE]
    logp = (logits / TEMPERATURE).log_softmax(-1)
    return logp[torch.arange(len(response)), response], -(logp.exp() * logp).sum(-1)


def reference_advantage(rewards, reward):
    """(R - mean) / (std + 1e-6) over the graded responses of a prompt; 0 where they are all alike."""
    if max(rewards) == min(rewards):
        return 0.0
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((other - mean) ** 2 for other in rewards) / (len(rewards) - 1))
    return (reward - mean) / (std + 1e-6)


def reference_rows(kept):
    """(prompt, response, advantage) of a step's responses in order; None where grading failed."""
    results = list(
        zip(kept.rollouts.groups.tolist(), kept.rewards.tolist(), kept.valid.tolist(), strict=True)
    )
    generation = kept.rollouts.generation
    for (group, reward, valid), tokens, length in zip(
        results, generation.tokens.tolist(), generation.lengths.tolist(), strict=True
    ):
        votes = [r for g, r, v in results if g == group and v]
        prompt = kept.rollouts.prompts[group].tokens
        yield (prompt, tokens[:length], reference_advantage(votes, reward)) if valid else None


def reference_loss(model, rows, old):
    """L = -1/N sum_i [ |o_i| min(w A, clip(w) A) - beta sum_t k3_t [A > 0 and H_t < H_old_t] ]"""
    loss = torch.zeros((), dtype=torch.float64)
    for (prompt, response, advantage), (old_logp, old_entropy) in zip(rows, old, strict=True):
        logp, entropy = token_values(model, prompt, response)
        d = logp - old_logp
        w = d.mean().exp()
        gain = torch.minimum(w * advantage, w.clamp(1 - CLIP, 1 + CLIP) * advantage)
        penalised = (entropy < old_entropy) & (advantage > 0)
        loss = loss - len(response) * gain + BETA * ((-d).exp() + d - 1)[penalised].sum()
    return loss / max(1, sum(len(response) for _, response, _ in rows))


def reference_step(model, kept, responses_per_update):
    """Plain gradient descent on the mini-batches of a step; the loss and gradient norm of each update."""
    rows = list(reference_rows(kept))
    with torch.no_grad():
        old = [row and token_values(model, *row[:2]) for row in rows]
    losses, norms = [], []
    for start in range(0, len(rows), responses_per_update):
        numbers = [n for n in range(start, start + responses_per_update) if rows[n] is not None]
        loss = reference_loss(model, [rows[n] for n in numbers], [old[n] for n in numbers])
        loss = loss + 0 * model.head.sum()  # nothing to train on: no loss and no gradient
        gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LEARNING_RATE * gradient
        losses.append(loss.item())
        norms.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))
    return losses, norms


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_losses_gradient_norms_and_weights_are_those_of_the_formula(updates):  # faults 6, 8, 16, 17, T4, T7
    policy = TorchPolicy(make_objective("tepo", kl_coefficient=BETA), temperature=TEMPERATURE)
    run = make_run(policy, updates_per_rollout=updates, learning_rate=LEARNING_RATE, max_steps=3)
    model = TinyLM()
    run.trainer.fit()
    failed = 0
    for row, kept in zip(run.recording.metrics, run.recording.kept, strict=True):
        losses, norms = reference_step(model, kept, 16 // updates)
        assert row["loss"] == pytest.approx(sum(losses) / updates, abs=2e-7)
        assert row["grad_norm"] == pytest.approx(sum(norms) / updates, rel=1e-6)
        failed += int((~kept.valid).sum())
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(policy.weights(), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(expected, TorchPolicy(policy.objective).weights(), atol=1e-2)
    assert failed > 0  # responses without a verdict are there
    if updates > 1:  # and so are clipped responses and penalised tokens
        assert sum(row["ratio/clip_fraction"] for row in run.recording.metrics) > 0
        assert max(row["kl/masked_mean"] for row in run.recording.metrics) > 1e-3


# --- splits --------------------------------------------------------------------------------------


class Widened(WatchedPolicy):
    """As sequence parallelism over 4 ranks wants its lengths."""

    length_multiple = 4


def few_graded(prompt, response_text, gold, metadata):
    """Grading fails but for the longest responses: of a group of 4, one is trained on, or none."""
    return RewardResult(float(gold in response_text), "ok" if len(response_text) > 6 else "error")


def one_prompt(prompt, response_text, gold, metadata):
    """One prompt of six has spread: of 4 groups, 2 are found, and the mini-batch is half full."""
    return RewardResult(float(gold in response_text and prompt == "1"), "ok")


CASES = {
    "tepo": dict(objective=dict(preset="tepo", kl_coefficient=BETA)),
    "grpo": dict(objective=dict(preset="grpo_dapo")),
    "group-token-mean": dict(objective=dict(preset="tepo", aggregation="group-token-mean")),
    "seq-mean-token-mean": dict(objective=dict(preset="tepo", aggregation="seq-mean-token-mean")),
    "entropy bonus": dict(objective=dict(preset="tepo", entropy_bonus=0.1)),
    "reference policy": dict(objective=dict(preset="grpo", kl_coefficient=BETA)),
    "erpo": dict(objective=dict(preset="erpo")),
    "ep_grpo": dict(objective=dict(preset="ep_grpo"), reward=one_prompt),
    "overlong": dict(objective=dict(preset="dapo"), overlong_fraction=0.4),
    "covariance": dict(
        objective=dict(preset="tepo", entropy_drop="covariance", kl_coefficient=BETA), learning_rate=1.0
    ),
    "clip_cov": dict(
        objective=dict(preset="clip_cov", covariance_low=0.05, covariance_high=2.0, selected_fraction=0.1)
    ),
    "clip_cov, few candidates": dict(
        objective=dict(preset="clip_cov", covariance_low=1.0, selected_fraction=0.5, clip_high=0.1)
    ),
    "kl_cov": dict(objective=dict(preset="kl_cov", selected_fraction=0.1, kl_coefficient=BETA)),
    # A mini-batch without advantages: all tokens tie, and the weights of the one before have moved them.
    "kl_cov, ties": dict(objective=dict(preset="kl_cov", selected_fraction=0.1), reward=one_prompt),
    "kl_cov, rank without tokens": dict(
        objective=dict(preset="kl_cov", selected_fraction=0.5), reward=few_graded, updates_per_rollout=4
    ),
    "partly filled": dict(
        objective=dict(preset="tepo"), reward=one_prompt, updates_per_rollout=1, dynamic_sampling=True
    ),
    "rank without tokens": dict(objective=dict(preset="tepo"), reward=few_graded, updates_per_rollout=4),
}


def outcome(rank, world_size, name, micro_batch_size, multiple):
    """Weights, metrics, and this rank's tokens of each update; micro-batches split the groups of 4."""
    case = dict(CASES[name])
    policy_class = Widened if multiple > 1 else WatchedPolicy
    policy = policy_class(
        make_objective(**case.pop("objective")), temperature=TEMPERATURE, group=world_group()
    )
    run = make_run(policy, max_steps=2, micro_batch_size=micro_batch_size, **case)
    run.trainer.fit()
    # How much is padding depends on the widths, and seconds on the machine.
    told = [
        {key: value for key, value in row.items() if not key.startswith(("time/", "tokens/padding"))}
        for row in run.recording.metrics
    ]
    tokens = [
        sum(int(micro.mask.sum()) for micro in mini_batch.micro_batches)
        for _, mini_batch, _ in policy.updates
    ]
    return policy.weights(), told, tokens


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-9)
    for row, other in zip(found[1], expected[1], strict=True):
        assert row == pytest.approx(other, rel=1e-7, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_and_widths_do_not_change_the_run(name):  # faults 6, 7, 9, 37, T3, T4
    expected = outcome(0, 1, name, 1, 1)
    for micro_batch_size, multiple in [(2, 1), (4, 1), (1, 4)]:
        assert_same(outcome(0, 1, name, micro_batch_size, multiple), expected)


def in_order_of_arrival(lengths, ranks, limits, attention_length):
    """Shares of one size and micro-batches of two, whatever the lengths."""
    size = -(-len(lengths) // ranks)
    count = max(1, -(-size // 2))
    shares = [list(range(len(lengths)))[rank * size : (rank + 1) * size] for rank in range(ranks)]
    return [[share[2 * micro : 2 * micro + 2] for micro in range(count)] for share in shares]


def all_outcomes(rank, world_size):
    found = {(name, micro): outcome(rank, world_size, name, micro, 1) for name in CASES for micro in (1, 2)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minibatch, "share_out", in_order_of_arrival)
        return found | {(name, "arrival"): outcome(rank, world_size, name, None, 1) for name in CASES}


def test_data_parallel_ranks_and_balancing_do_not_change_the_run(worlds):  # faults 7, 9, 24, 37, T9
    ranks = worlds(2).run(all_outcomes)
    for case in ranks[0]:
        expected = outcome(0, 1, case[0], 4, 1)
        for outcomes in ranks:
            assert_same(outcomes[case], expected)
        shares = list(zip(*(outcomes[case][2] for outcomes in ranks), strict=True))
        assert [sum(share) for share in shares] == expected[2]
        if "rank without tokens" in case[0]:
            assert any(min(share) == 0 < max(share) for share in shares)
