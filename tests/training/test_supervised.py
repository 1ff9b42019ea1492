"""The warm start against torch's own cross-entropy and gradient descent."""

import pytest
import torch
from support.tiny_run import PROMPTS, world_group
from support.torch_policy import STOP, VOCAB_SIZE, TinyLM, TorchPolicy, respell

from tepo_nemo.data.order import PromptOrder
from tepo_nemo.objectives import registry
from tepo_nemo.training.supervised import train_supervised

ANSWERS = [[*respell(answer), STOP] for answer in ("a", "ba", "c12b", "", "21", "aaaab")]
SEED, BATCH, LEARNING_RATE = 3, 4, 0.8


def warm_up(rank, world_size, steps, micro_batch_size):
    policy = TorchPolicy(registry.build("next_token", {}), group=world_group())
    losses = []
    train_supervised(
        policy,
        PROMPTS,
        ANSWERS,
        seed=SEED,
        steps=steps,
        batch_size=BATCH,
        micro_batch_size=micro_batch_size,
        micro_batch_tokens=None,
        sequence_packing=False,
        learning_rate=LEARNING_RATE,
        report=lambda step, loss: losses.append((step, loss)),
    )
    policy.prepare_for_inference()  # it is left idle, as the trainer finds it
    return policy.weights(), losses


def reference(steps):
    """One sequence after the other; 6 pairs, 4 a step, so that step 2 crosses the edge of an epoch."""
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = []
    for step in range(steps):
        logits, targets = [], []
        for index in PromptOrder(len(PROMPTS), SEED).take(step * BATCH, BATCH):
            prompt, answer = PROMPTS[index].tokens, ANSWERS[index]
            logits.append(model(torch.tensor([prompt + answer[:-1]]))[0, len(prompt) - 1 :, :VOCAB_SIZE])
            targets += answer
        loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.tensor(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), losses


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_losses_and_weights_are_those_of_cross_entropy(micro_batch_size):  # faults 6, 16
    weights, losses = warm_up(0, 1, 5, micro_batch_size)
    expected_weights, expected_losses = reference(5)
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5]
    assert [loss for _, loss in losses] == pytest.approx(expected_losses, rel=1e-9)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-9)


def test_data_parallel_ranks_do_not_change_it(worlds):  # faults 7
    expected_weights, expected_losses = reference(4)
    for weights, losses in worlds(2).run(warm_up, 4, 1):
        assert [loss for _, loss in losses] == pytest.approx(expected_losses, rel=1e-9)
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-9)


def test_the_answers_are_learned():
    _, losses = warm_up(0, 1, 150, 4)
    assert losses[0][1] > 1 and sum(loss for _, loss in losses[-6:]) / 6 < 0.2 * losses[0][1]


def test_micro_batches_need_not_divide_the_batch():  # faults 24, 25
    weights, losses = warm_up(0, 1, 5, 3)
    expected_weights, expected_losses = reference(5)
    assert [loss for _, loss in losses] == pytest.approx(expected_losses, rel=1e-9)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-9)
