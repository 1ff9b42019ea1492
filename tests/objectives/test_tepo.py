"""TEPO against the float64 reference, its closed forms, its identities and the faults special to it."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.cases import (
    AGGREGATIONS,
    Case,
    assert_same,
    cases,
    make_case,
    on_meta,
    preset,
    run,
    token_batch,
    totals,
)
from objectives.reference import reference

from tepo_nemo.objectives import MinibatchTotals, TokenBatch, build

INF = math.inf
OPTIONS = {
    "surrogate": st.sampled_from(["ppo", "printed"]),
    "ratio": st.sampled_from(["token", "sequence-geometric", "sequence-product", "none"]),
    "ratio_gradient": st.sampled_from(["full", "stop_gradient"]),
    "clip_low": st.sampled_from([0.0, 3e-4, 0.2, 1.0, INF]),
    "clip_high": st.sampled_from([0.0, 4e-4, 0.28, 1.0, INF]),
    "kl_estimator": st.sampled_from(["k1", "k2", "k3", "abs"]),
    "kl_coefficient": st.sampled_from([0.0, 0.01, 1.0]),
    "kl_mask": st.sampled_from(["tepo", "all", "none"]),
    "entropy_drop": st.sampled_from(["entropy", "surprisal", "covariance"]),
    "entropy_drop_tolerance": st.sampled_from([0.0, 0.1]),
    "aggregation": st.sampled_from(AGGREGATIONS),
    "entropy_bonus": st.sampled_from([0.0, 0.02]),
}
PLAIN = preset("tepo") | {"clip_low": INF, "clip_high": INF, "kl_mask": "none"}


def tepo(**options):
    return build("tepo", preset("tepo") | options)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(case=cases(), options=st.fixed_dictionaries(OPTIONS))
def test_loss_gradients_and_metrics_match_the_formulas(case: Case, options: dict):
    assert_same(run(build("tepo", options), case), reference(case, options))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio_gradient", ["full", "stop_gradient"])
def test_production_precision_stays_within_float32_rounding(aggregation, ratio_gradient):
    options = preset("tepo") | {
        "aggregation": aggregation,
        "ratio_gradient": ratio_gradient,
        "entropy_bonus": 0.01,
    }
    case = make_case(7, 8, 12, shaped=True)
    actual = run(build("tepo", options), case, dtype=torch.float32)
    assert_same(actual, reference(case, options), tolerance=2e-6)


SMOOTH = list(
    itertools.product(["ppo", "printed"], ["token", "sequence-geometric", "sequence-product"], ["k2", "k3"])
)


@pytest.mark.parametrize(("surrogate", "ratio", "estimator"), SMOOTH)
def test_numerical_derivative_in_float64(surrogate, ratio, estimator):
    """Where value and gradient belong to one function: no stop-gradient, no k1."""
    case = make_case(3, 4, 5, shaped=True)
    objective = tepo(
        surrogate=surrogate,
        ratio=ratio,
        kl_estimator=estimator,
        kl_mask="all",
        kl_coefficient=0.5,
        entropy_bonus=0.1,
    )

    def loss(logprobs, entropy):
        batch = replace(token_batch(case), logprobs=logprobs, entropy=entropy)
        return objective(batch, totals(case)).loss

    zeros = np.zeros_like(case.logprobs)
    leaves = (np.where(case.mask, case.logprobs, zeros), np.where(case.mask, case.entropy, zeros))
    assert torch.autograd.gradcheck(loss, [torch.tensor(leaf, requires_grad=True) for leaf in leaves])


# --- closed forms ---------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), ratio_gradient=st.sampled_from(["full", "stop_gradient"]))
def test_gradient_by_the_weights_is_the_closed_form(seed: int, ratio_gradient: str):
    """Faults T5: grad J = 1/sum|o| sum_i w_i A_i sum_t grad logp, neither lost nor |o| times as much."""
    rng = np.random.default_rng(seed)
    responses, positions, vocabulary = 4, 6, 5
    logits = rng.normal(size=vocabulary)
    old_logits = logits + 0.3 * rng.normal(size=vocabulary)
    chosen = rng.integers(0, vocabulary, (responses, positions))
    mask = np.arange(positions) < rng.integers(0, positions + 1, (responses, 1))
    mask[0, 0] = True
    advantages = rng.normal(size=responses)

    def log_softmax(values):
        return values - np.log(np.exp(values).sum())

    d = log_softmax(logits)[chosen] - log_softmax(old_logits)[chosen]
    expected = np.zeros(vocabulary)
    for i in range(responses):
        cells = np.flatnonzero(mask[i])
        if len(cells) == 0:
            continue
        w = math.exp(sum(d[i, t] for t in cells) / len(cells))
        for t in cells:
            expected += w * advantages[i] * (np.eye(vocabulary)[chosen[i, t]] - np.exp(log_softmax(logits)))
    expected /= mask.sum()

    weights = torch.tensor(logits, requires_grad=True)
    logprobs = torch.log_softmax(weights, 0)[torch.tensor(chosen)]
    zeros = torch.zeros(responses, positions, dtype=torch.float64)
    tokens = TokenBatch(
        logprobs=logprobs,
        entropy=zeros,
        old_logprobs=torch.tensor(log_softmax(old_logits)[chosen]),
        old_entropy=zeros,
        advantages=torch.tensor(advantages)[:, None].expand(responses, positions),
        mask=torch.tensor(mask),
        group_tokens=torch.ones(responses, dtype=torch.float64),
    )
    counts = MinibatchTotals(int(mask.sum()), int(mask.any(1).sum()), 1, positions)
    build("tepo", PLAIN | {"ratio_gradient": ratio_gradient})(tokens, counts).loss.backward()
    np.testing.assert_allclose(-weights.grad.numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("ratio", ["token", "sequence-geometric", "sequence-product", "none"])
def test_at_the_old_weights_only_the_policy_gradient_is_left(ratio, estimator):
    """w = 1, M = 0, KL = 0; the gradient of every token is -A / sum|o| whatever the estimator, faults T2."""
    case = make_case(11, 5, 6, spread=0.0)
    case = replace(case, entropy=case.old_entropy)
    result = run(tepo(ratio=ratio, kl_estimator=estimator, kl_coefficient=1.0), case)
    tokens = case.mask.sum()
    if ratio != "sequence-product":
        expected = np.where(case.mask, -case.advantages / tokens, 0)
    else:  # each token moves the ratio of all its response's tokens
        expected = np.where(case.mask, -case.advantages * case.mask.sum(1, keepdims=True) / tokens, 0)
    np.testing.assert_allclose(result.logprob_gradient, expected, atol=1e-15)
    assert result.metrics["ratio/mean"] == (tokens, tokens)
    assert result.metrics["ratio/clip_fraction"][0] == 0
    assert result.metrics["mask/fraction"] == (0, tokens)
    assert result.metrics["kl/mean"][0] == result.metrics["kl/masked_mean"][0] == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_rounding_noise_in_the_mask_is_harmless_at_the_old_weights(estimator):
    """Faults T1, T2: noise of 5e-6 nats picks about half of the tokens; it must not move them."""
    case = make_case(12, 8, 16, spread=0.0, density=1.0)
    case = replace(case, advantages=np.abs(case.advantages) + 1)
    noise = 5e-6 * np.random.default_rng(0).uniform(-1, 1, case.mask.shape)
    noisy = replace(case, entropy=case.old_entropy + noise)
    quiet = replace(case, entropy=case.old_entropy)
    expected = run(tepo(kl_estimator=estimator, kl_coefficient=1.0), quiet)
    actual = run(tepo(kl_estimator=estimator, kl_coefficient=1.0), noisy)
    assert 0.3 < actual.metrics["mask/fraction"][0] / case.mask.sum() < 0.7
    np.testing.assert_array_equal(actual.logprob_gradient, expected.logprob_gradient)
    assert run(tepo(entropy_drop_tolerance=1e-5), noisy).metrics["mask/fraction"][0] == 0


def test_equal_rewards_give_no_loss_and_no_gradient():
    """Faults 1, seen from the loss: A = 0 for a whole mini-batch."""
    case = make_case(5, 4, 5, spread=3.0)
    case = replace(case, advantages=np.zeros_like(case.advantages))
    result = run(tepo(), case)
    assert result.loss == 0
    assert not result.logprob_gradient.any()
    assert result.metrics["ratio/clip_fraction"][0] == 0


# --- identities -----------------------------------------------------------------------------------


def gspo_loss(case: Case, low: float, high: float) -> float:
    """GSPO (arXiv 2507.18071, eqs. 5 and 7): mean over responses of min(s A, clip(s) A)."""
    gains = []
    for i in range(case.mask.shape[0]):
        cells = np.flatnonzero(case.mask[i])
        if len(cells):
            s = math.exp(np.mean([case.logprobs[i, t] - case.old_logprobs[i, t] for t in cells]))
            a = case.advantages[i, cells[0]]
            gains.append(min(s * a, min(max(s, 1 - low), 1 + high) * a))
    return -float(np.mean(gains))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ratio_gradient", ["full", "stop_gradient"])
def test_without_kl_and_per_response_mean_it_is_gspo(seed, ratio_gradient):
    """`stop_gradient` is GSPO-token. The gradient of GSPO's loss is taken numerically."""
    case = make_case(seed, 5, 4)
    objective = tepo(
        kl_mask="none",
        aggregation="seq-mean-token-mean",
        clip_low=0.1,
        clip_high=0.15,
        ratio_gradient=ratio_gradient,
    )
    result = run(objective, case)
    assert result.loss == pytest.approx(gspo_loss(case, 0.1, 0.15), rel=1e-12)
    step = 1e-6
    for cell in case.valid:
        up, down = case.logprobs.copy(), case.logprobs.copy()
        up[cell] += step
        down[cell] -= step
        above, below = (gspo_loss(replace(case, logprobs=moved), 0.1, 0.15) for moved in (up, down))
        assert result.logprob_gradient[cell] == pytest.approx((above - below) / (2 * step), abs=1e-8)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), surrogate=OPTIONS["surrogate"], aggregation=OPTIONS["aggregation"])
def test_both_ratio_gradients_agree_while_the_advantage_is_constant(seed, surrogate, aggregation):
    """Faults T5."""
    case = make_case(seed, 4, 5, spread=0.5)
    full, stopped = (
        run(tepo(surrogate=surrogate, aggregation=aggregation, ratio_gradient=gradient), case)
        for gradient in ("full", "stop_gradient")
    )
    assert_same(stopped, full)


def test_the_ratio_gradients_part_where_the_advantage_varies():
    """Two tokens at w = 1 with A = 2 and 0: the full gradient shares A over both, the other does not."""
    case = Case(
        *np.zeros((3, 1, 2)), *np.zeros((2, 1, 2)), np.array([[2.0, 0.0]]), np.ones((1, 2), bool), np.zeros(1)
    )
    full, stopped = (run(tepo(ratio_gradient=gradient), case) for gradient in ("full", "stop_gradient"))
    assert full.loss == stopped.loss == -1.0
    np.testing.assert_allclose(full.logprob_gradient, [[-0.5, -0.5]])
    np.testing.assert_allclose(stopped.logprob_gradient, [[-1.0, 0.0]])


@pytest.mark.parametrize("kl_mask", ["tepo", "all"])
def test_a_zero_coefficient_is_tepo_without_kl(kl_mask):
    """Panel A with beta = 0 is TEPO without KL, but for what the metrics say about the mask."""
    case = make_case(2, 5, 6)
    without = run(tepo(kl_mask="none"), case)
    zero = run(tepo(kl_mask=kl_mask, kl_coefficient=0.0), case)
    assert zero.loss == without.loss
    np.testing.assert_array_equal(zero.logprob_gradient, without.logprob_gradient)


# --- updates and extremes -------------------------------------------------------------------------


def test_the_second_inner_update_sees_another_ratio():
    """Faults 36: old log-probabilities stay those of the rollout; ratio 1 and no clip first, then both."""
    weights = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 1, 1]])
    advantages = torch.tensor([[1.0], [-1.0], [0.5]], dtype=torch.float64).expand(3, 4)
    old = torch.log_softmax(weights, -1).gather(-1, chosen).detach()
    zeros = torch.zeros_like(old)
    steps = []
    for _ in range(2):
        logprobs = torch.log_softmax(weights, -1).gather(-1, chosen)
        mask, group = torch.ones(3, 4, dtype=torch.bool), torch.full((3,), 12.0, dtype=torch.float64)
        tokens = TokenBatch(logprobs, zeros, old, zeros, advantages, mask, group)
        output = tepo(ratio="token")(tokens, MinibatchTotals(12, 3, 1, 4))
        steps.append((output.metrics["ratio/mean"], output.metrics["ratio/clip_fraction"]))
        output.loss.backward()
        weights.data -= 30 * weights.grad
        weights.grad = None
    (first_ratio, first_clip), (second_ratio, second_clip) = steps
    assert first_ratio.numerator == first_ratio.denominator == 12 and first_clip.numerator == 0
    # In rows 0 and 1 each token stands once, so their gradient is 0. Row 2 holds the tokens 0 0 1 1: its
    # logits move by 30 * 0.5 / 12 * (1, 1, -1, -1), its ratios are then 1.85, beyond the clip at 1.2.
    expected = 4 * math.exp(1.25) / (2 * math.exp(1.25) + 2 * math.exp(-1.25))
    assert second_ratio.numerator.item() == pytest.approx(8 + 4 * expected)
    assert second_clip.numerator == 4


@pytest.mark.parametrize("size", [50.0, -50.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("ratio", ["token", "sequence-geometric", "sequence-product"])
def test_huge_ratios_stay_finite_with_their_gradient(size, advantage, ratio):
    """Faults 18, 19: eight tokens with a log-ratio of 50 each."""
    shape = (1, 8)
    zeros = np.zeros(shape)
    mask = np.ones(shape, bool)
    case = Case(
        np.full(shape, size), zeros, zeros, zeros, zeros, np.full(shape, advantage), mask, np.zeros(1)
    )
    result = run(tepo(ratio=ratio), case, dtype=torch.float32)
    ratio_value = math.exp(math.copysign(20, size))
    kept = min(ratio_value, 1.2) if advantage > 0 else max(ratio_value, 0.8)
    assert result.loss == pytest.approx(-advantage * kept, rel=1e-6)
    assert not result.logprob_gradient.any()


def test_no_step_waits_for_the_device():
    """On meta tensors nothing has a value: reading one, or mixing in another device, would raise."""
    for options in ({}, {"entropy_drop": "covariance"}, {"surrogate": "printed", "entropy_bonus": 0.1}):
        objective = tepo(**options)
        case = make_case(1, 3, 4)
        meta, counts = on_meta(token_batch(case)), totals(case, statistics=True)
        statistics = type(counts.statistics)(**{k: v.to("meta") for k, v in vars(counts.statistics).items()})
        output = objective(meta, replace(counts, statistics=statistics))
        assert output.loss.shape == ()
