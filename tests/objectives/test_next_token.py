"""The supervised warm start: cross-entropy over the mini-batch's tokens."""

import numpy as np
import pytest
import torch
from objectives.cases import make_case, run

from tepo_nemo.objectives import MinibatchTotals, TokenBatch, build


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_it_is_the_cross_entropy_of_the_trained_tokens(parts):
    """Against torch's own cross-entropy, in value and in the gradient by the logits, over micro-batches."""
    torch.manual_seed(1)
    logits = torch.randn(4, 6, 9, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 9, (4, 6))
    mask = torch.rand(4, 6) < 0.6
    mask[2] = False
    expected = torch.nn.functional.cross_entropy(logits[mask], target[mask])
    (expected_gradient,) = torch.autograd.grad(expected, logits)

    share = 0.0
    counts = MinibatchTotals(tokens=int(mask.sum()), responses=3, groups=1, max_response_length=6)
    for rows in torch.arange(4).chunk(parts):
        logprobs = torch.log_softmax(logits[rows], -1).gather(-1, target[rows, :, None]).squeeze(-1)
        old, zeros = logprobs.detach(), torch.zeros_like(logprobs)
        batch = TokenBatch(logprobs, zeros, old, zeros, zeros, mask[rows], torch.ones(len(rows)))
        output = build("next_token", {})(batch, counts)
        output.loss.backward()
        share += output.loss.item()
    assert share == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(logits.grad, expected_gradient)


def test_advantages_and_old_statistics_do_not_enter_the_loss():
    case, other = make_case(1, 3, 4, spread=0.0), make_case(1, 3, 4, spread=0.0)
    other.advantages[:] = -7
    other.old_logprobs[:] = -2
    first, second = (run(build("next_token", {}), x) for x in (case, other))
    assert first.loss == second.loss == pytest.approx(-case.logprobs[case.mask].mean())
    np.testing.assert_array_equal(first.logprob_gradient, second.logprob_gradient)
    assert first.metrics["ratio/mean"] == (case.mask.sum(), case.mask.sum())


def test_a_fully_masked_micro_batch_is_a_zero_on_the_graph():
    """Faults 9."""
    result = run(build("next_token", {}), make_case(2, 2, 3, density=0.0))
    assert result.loss == 0 and not result.logprob_gradient.any()
