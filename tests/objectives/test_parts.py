"""The parts that methods share, each with the numbers that the reports of its faults print."""

import math

import numpy as np
import pytest
import torch
from objectives.cases import make_case, token_batch

from tepo_nemo.objectives import MinibatchTotals, TokenBatch
from tepo_nemo.objectives.aggregation import aggregate
from tepo_nemo.objectives.divergence import divergence
from tepo_nemo.objectives.metrics import token_mean
from tepo_nemo.objectives.ratio import importance_ratio
from tepo_nemo.objectives.surrogate import ppo_surrogate, printed_surrogate

TABLE = [  # A, w, ppo value, is it cut, printed value, is it cut; clip to [0.8, 1.2]
    (1.0, 1.5, 1.2, True, 1.2, True),
    (1.0, 1.1, 1.1, False, 1.1, False),
    (1.0, 0.5, 0.5, False, 0.5, False),
    (-1.0, 1.5, -1.5, False, -1.2, True),
    (-1.0, 0.9, -0.9, False, -0.9, False),
    (-1.0, 0.5, -0.8, True, -0.5, False),
    (0.0, 1.5, 0.0, False, 0.0, False),
    (0.0, 0.5, 0.0, False, 0.0, False),
]


@pytest.mark.parametrize("form", ["ppo", "printed"])
@pytest.mark.parametrize("row", TABLE)
def test_surrogate_table_of_signs(row, form):
    """Faults T6: the two forms differ for A < 0 and beyond the lower clip."""
    advantage, w, ppo, ppo_cut, printed, printed_cut = row
    value, cut = (ppo, ppo_cut) if form == "ppo" else (printed, printed_cut)
    ratio = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    function = ppo_surrogate if form == "ppo" else printed_surrogate
    surrogate = function(ratio, torch.tensor(advantage, dtype=torch.float64), 0.2, 0.2)
    surrogate.value.backward()
    assert surrogate.value.item() == pytest.approx(value)
    assert surrogate.clipped.item() is cut
    assert ratio.grad.item() == (0 if cut else advantage)


@pytest.mark.parametrize(
    ("advantage", "w", "value", "cut"),
    [
        (-2.0, 12.0, -20.0, True),
        (-2.0, 9.0, -18.0, False),
        (-2.0, 0.1, -1.6, True),
        (2.0, 12.0, 2.4, True),
        (0.0, 12.0, 0.0, False),
    ],
)
def test_dual_clip_bounds_negative_advantages_only(advantage, w, value, cut):
    ratio = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    surrogate = ppo_surrogate(ratio, torch.tensor(advantage, dtype=torch.float64), 0.2, 0.2, dual_clip=10.0)
    surrogate.value.backward()
    assert surrogate.value.item() == pytest.approx(value)
    assert surrogate.clipped.item() is cut
    assert ratio.grad.item() == (0 if cut else advantage)


@pytest.mark.parametrize("side", [0.8, 1.2])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_on_the_edge_is_not_cut(side, advantage):
    """The edge belongs to the inside: the whole gradient passes, not the half of a tied minimum."""
    ratio = torch.tensor(side, dtype=torch.float64, requires_grad=True)
    width = abs(side - 1)
    surrogate = ppo_surrogate(ratio, torch.tensor(advantage, dtype=torch.float64), width, width)
    surrogate.value.backward()
    assert not surrogate.clipped
    assert ratio.grad.item() == advantage


# d, k1, k2, k3, abs; then the gradients
DIVERGENCES = [
    (0.0, (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)),
    (0.5, (0.5, 0.125, 0.1065306597126334, 0.5), (0.5, 0.5, 0.3934693402873666, 1.0)),
    (-0.5, (-0.5, 0.125, 0.1487212707001282, 0.5), (-0.5, -0.5, -0.6487212707001282, -1.0)),
    (100.0, (20.0, 200.0, 19.0 + math.exp(-20), 20.0), (0.0, 0.0, 0.0, 0.0)),
    (-100.0, (-20.0, 200.0, math.exp(20) - 21, 20.0), (0.0, 0.0, 0.0, 0.0)),
]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize(("d", "values", "gradients"), DIVERGENCES)
def test_divergence_and_its_gradient(d, values, gradients, estimator):
    """Faults T2: no push at d = 0, k1 included. Faults 18: at d = 100 value and gradient are finite."""
    column = ["k1", "k2", "k3", "abs"].index(estimator)
    log_ratio = torch.tensor(d, dtype=torch.float64, requires_grad=True)
    value = divergence(log_ratio, estimator)
    value.backward()
    assert value.item() == pytest.approx(values[column], rel=1e-12)
    assert log_ratio.grad.item() == pytest.approx(gradients[column], rel=1e-12)


def test_k3_of_a_small_log_ratio_survives_float32():
    """exp(-d) + d - 1 at d = 1e-4 is 5e-9; by exp and subtraction float32 would give 0 or 6e-8."""
    d = torch.tensor([1e-4, -1e-4])
    assert divergence(d, "k3").tolist() == pytest.approx([5e-9, 5e-9], rel=2e-3)


@pytest.mark.parametrize(
    ("kind", "expected"), [("token", [1.2, -1.2, 0.0]), ("sequence-geometric", [1.2, -1.2, 0.0])]
)
def test_an_exploding_ratio_has_a_finite_loss_and_gradient(kind, expected):
    """Faults 18: exp(100) at A = 1 is 1.2 after the clip, at A = 0 it is 0; no gradient is NaN."""
    logprobs = torch.full((3, 1), 100.0, requires_grad=True)
    zeros = torch.zeros(3, 1)
    advantages = torch.tensor([[1.0], [-1.0], [0.0]])
    tokens = TokenBatch(
        logprobs, zeros, zeros, zeros, advantages, torch.ones(3, 1, dtype=torch.bool), torch.ones(3)
    )
    value = ppo_surrogate(importance_ratio(tokens, kind), advantages, 0.2, 0.2).value
    value.sum().backward()
    assert value[0].item() == pytest.approx(expected[0])
    assert value[1].item() == pytest.approx(-math.exp(20), rel=1e-5)
    assert value[2].item() == 0
    assert logprobs.grad.tolist() == [[0.0], [0.0], [0.0]]


@pytest.mark.parametrize("gradient", ["full", "stop_gradient"])
@pytest.mark.parametrize("kind", ["token", "sequence-geometric", "sequence-product", "none"])
def test_an_empty_response_has_the_ratio_one(kind, gradient):
    """Faults 10: its mean log-ratio is not 0 / 0; neither is that of a row of padding in between others."""
    logprobs = torch.tensor([[math.nan, 1.0], [math.inf, 2.0], [0.5, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[False, False], [False, True], [False, False]])
    zeros = torch.zeros(3, 2, dtype=torch.float64)
    ratio = importance_ratio(
        TokenBatch(logprobs, zeros, zeros, zeros, zeros, mask, zeros[:, 0]), kind, gradient
    )
    assert ratio.shape == (3, 2)
    assert ratio[[0, 2]].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert ratio[1, 1].item() == pytest.approx(1.0 if kind == "none" else math.exp(2.0))


def whole(mask: list[list[bool]]) -> TokenBatch:
    tensor = torch.tensor(mask)
    zeros = torch.zeros(tensor.shape, dtype=torch.float64)
    return TokenBatch(zeros, zeros, zeros, zeros, zeros, tensor, torch.ones(len(mask)))


def test_a_token_mean_is_not_a_mean_of_micro_batch_means():
    """Faults 6: 100 tokens at 2.0 and 900 at 0.5 are 0.65, not 1.25."""
    totals = MinibatchTotals(tokens=1000, responses=2, groups=1, max_response_length=900)
    parts = [torch.full((1, 100), 2.0), torch.full((1, 900), 0.5)]
    shares = [aggregate(part, whole([[True] * part.shape[1]]), totals, "token-mean").item() for part in parts]
    assert sum(shares) == pytest.approx(0.65)


def test_masked_nan_reaches_neither_value_nor_gradient():
    """Faults 9: loss [1, NaN] under the mask [1, 0] is 1."""
    values = torch.tensor([[1.0, math.nan]], requires_grad=True)
    totals = MinibatchTotals(tokens=1, responses=1, groups=1, max_response_length=2)
    share = aggregate(values, whole([[True, False]]), totals, "token-mean")
    share.backward()
    assert share.item() == 1
    assert values.grad.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("name", ["logprobs", "entropy", "old_logprobs", "old_entropy", "advantages"])
def test_a_token_batch_holds_zero_where_it_is_masked(name):
    """Faults 9: what a method then computes from masked positions is finite."""
    case = make_case(0, 3, 4, density=0.5)
    values = getattr(token_batch(case), name).numpy()
    np.testing.assert_array_equal(values, np.where(case.mask, getattr(case, name), 0))


def test_only_the_current_policy_keeps_its_graph():
    """A, H_old and the old log-probabilities never carry gradient, whatever the caller passes."""
    leaves = [torch.ones(2, 3, requires_grad=True) for _ in range(6)]
    logprobs, entropy, old_logprobs, old_entropy, advantages, reference = (leaf * 2 for leaf in leaves)
    batch = TokenBatch(
        logprobs,
        entropy,
        old_logprobs,
        old_entropy,
        advantages,
        torch.ones(2, 3).bool(),
        torch.ones(2),
        reference,
    )
    carrying = {name for name, value in vars(batch).items() if value is not None and value.requires_grad}
    assert carrying == {"logprobs", "entropy"}


@pytest.mark.parametrize(
    "change",
    [
        {"mask": torch.ones(2, 3)},
        {"group_tokens": torch.ones(3)},
        {"entropy": torch.ones(2, 1)},
        {"selected": torch.ones(2, 3)},
        {"selected": torch.ones(2, 1).bool()},
    ],
)
def test_a_token_batch_of_wrong_shape_is_refused(change):
    """A broadcast would be silently wrong: [S] against [S, T], or a float mask."""
    fields = dict.fromkeys(
        ("logprobs", "entropy", "old_logprobs", "old_entropy", "advantages"), torch.ones(2, 3)
    )
    with pytest.raises(AssertionError):
        TokenBatch(**(fields | {"mask": torch.ones(2, 3).bool(), "group_tokens": torch.ones(2)} | change))


def test_a_mean_counts_exactly_where_float32_cannot():
    """2**24 + 1 tokens of value 1: float32 would lose the last one."""
    ones = torch.ones(2**24 + 1, dtype=torch.float32)
    mean = token_mean(ones, ones.bool())
    assert mean.numerator.item() == mean.denominator.item() == 2**24 + 1
