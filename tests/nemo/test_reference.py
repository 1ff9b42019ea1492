"""One rank against the same model and losses in float64, written from the formulas; layouts are compared with
one rank in test_equivalence.py.
"""

from collections.abc import Callable

import pytest
import torch
from support.layouts import LAYOUTS, REFERENCE, Given, Outcome, assert_close, loss_cases
from support.reference_model import grpo_terms, response_statistics, tepo_terms, token_mean_loss
from support.synthetic import first_rows
from support.toy import ToyFolder

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

both = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])

TERMS = {
    "tepo, micro-batch 4": tepo_terms(),
    "entropy bonus": tepo_terms(entropy_bonus=0.01),
    "algorithm=grpo_dapo": grpo_terms(),
    # The current weights are the old ones: no token loses entropy, and no ratio is clipped.
    "at the old weights": tepo_terms(kl_coefficient=0.0),
    "five of eight": tepo_terms(),
    "two responses": tepo_terms(),
    "last micro-batch masked": tepo_terms(),
    "second half masked": tepo_terms(),
}


@both
def test_statistics(given: Callable[[bool], Given], tied: bool) -> None:
    """Log-prob and entropy of every response token, and 0 elsewhere."""
    start = given(tied)
    expected = torch.zeros(2, *start.start.logprobs.shape, dtype=torch.float64)
    for row, length in enumerate(start.batch.response_lengths.tolist()):
        for place, value in zip(
            expected, response_statistics(start.weights_in_float64, start.batch, row), strict=True
        ):
            place[row, :length] = value.detach()
    torch.testing.assert_close(start.start.logprobs.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(start.start.entropy.double(), expected[1], rtol=0, atol=1e-5)


@both
@pytest.mark.parametrize("name", TERMS)
def test_loss_and_gradients(
    run: Callable[[str, bool], dict[str, Outcome]],
    toy: ToyFolder,
    given: Callable[[bool], Given],
    tied: bool,
    name: str,
) -> None:
    start = given(tied)
    case = loss_cases(toy, LAYOUTS[REFERENCE], start)[name]
    batch, old = first_rows(case.batch, case.old or start.start, case.responses_per_update)
    weights = start.weights_in_float64
    loss = token_mean_loss(weights, batch, old, TERMS[name])
    gradients = torch.autograd.grad(loss, list(weights.values()))
    actual = run(REFERENCE, tied)["sgd"]
    assert actual.losses[name] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(actual.gradients[name], dict(zip(weights, gradients, strict=True)), 1e-5, name)
