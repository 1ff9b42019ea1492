"""FusedAdam against PyTorch's optimizers and closed forms."""

import copy
import math

import pytest
import torch

from tepo_nemo.cpu.optimizer import FusedAdam

STEPS = 6


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(0.1 * torch.randn(n, 4, generator=generator).to(dtype)) for n in (1, 5, 3)]


def descend(
    optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], start: int = 0, end: int = STEPS
) -> None:
    """Gradients that depend on the step alone, of very different sizes."""
    for step in range(start, end):
        generator = torch.Generator().manual_seed(100 + step)
        for scale, weight in zip((1e-3, 1.0, 1e2), weights, strict=True):
            weight.grad = (scale * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
        optimizer.step()


def two_groups(weights: list[torch.nn.Parameter], **options) -> list[dict]:
    return [
        {"params": weights[:1], "weight_decay": 0.0, **options},
        {"params": weights[1:], "weight_decay": 0.1, **options, "lr": 3e-3},
    ]


@pytest.mark.parametrize("decoupled", [True, False])
def test_steps_equal_those_of_torch(decoupled):
    options = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    ours, theirs = parameters(), parameters()
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    descend(FusedAdam(two_groups(ours, **options), adam_w_mode=decoupled), ours)
    descend(reference(two_groups(theirs, **options), foreach=False), theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_first_step_is_the_closed_form(bias_correction):
    lr, beta1, beta2, eps, decay = 0.01, 0.9, 0.99, 1e-3, 0.5
    w, g = 2.0, -0.25
    weight = torch.nn.Parameter(torch.tensor([w]))
    weight.grad = torch.tensor([g])
    FusedAdam([weight], lr, bias_correction, (beta1, beta2), eps, weight_decay=decay).step()
    first, second = (1 - beta1) * g, (1 - beta2) * g * g
    if bias_correction:  # the corrections are exactly the factors above
        first, second = g, g * g
    expected = w - lr * decay * w - lr * first / (math.sqrt(second) + eps)
    assert weight.item() == pytest.approx(expected, rel=1e-6)


def test_bf16_weights_take_the_fp32_update_rounded_once():
    exact, rounded = parameters(), parameters(torch.bfloat16)
    for weight, half in zip(exact, rounded, strict=True):
        weight.data.copy_(half)
    optimizer = FusedAdam(rounded, lr=1e-3, weight_decay=0.1)
    for weight, half in zip(exact, rounded, strict=True):
        half.grad = torch.full_like(half, 0.5)
        weight.grad = half.grad.float()
    optimizer.step()
    torch.optim.AdamW(exact, lr=1e-3, weight_decay=0.1).step()
    for weight, half in zip(exact, rounded, strict=True):
        assert torch.equal(half, weight.bfloat16())
        assert {moment.dtype for moment in optimizer.state[half].values()} == {torch.float32}


def test_step_is_kept_once_a_group_and_not_beside_the_parameters():
    weights = parameters()
    optimizer = FusedAdam(two_groups(weights))
    descend(optimizer, weights)
    state = optimizer.state_dict()
    assert [group["step"] for group in state["param_groups"]] == [STEPS, STEPS]
    assert {name for moments in state["state"].values() for name in moments} == {"exp_avg", "exp_avg_sq"}


def test_saved_state_continues_as_if_never_stopped():
    straight, stopped = parameters(), parameters()
    descend(FusedAdam(straight, lr=1e-2), straight)
    first = FusedAdam(stopped, lr=1e-2)
    descend(first, stopped, end=2)
    second = FusedAdam(stopped, lr=1e-2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    descend(second, stopped, start=2)
    for a, b in zip(straight, stopped, strict=True):
        assert torch.equal(a, b)


def test_parameters_without_gradient_stay():
    weights = parameters()
    before = weights[1].detach().clone()
    for weight in (weights[0], weights[2]):
        weight.grad = torch.ones_like(weight)
    optimizer = FusedAdam(weights, weight_decay=0.1)
    optimizer.step()
    assert torch.equal(weights[1], before)
    assert weights[1] not in optimizer.state
