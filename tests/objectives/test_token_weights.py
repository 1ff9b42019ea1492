"""Token weights multiply each token's gradient, for every method, in the stop-gradient form of a ratio."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from objectives.cases import (
    AGGREGATIONS,
    MAX_LENGTH,
    PRESETS,
    Case,
    assert_same,
    build_preset,
    make_case,
    run,
    token_batch,
)

NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))
TOLERANCE = 1e-12


def random_weights(case: Case, seed: int = 3) -> np.ndarray:
    """Up to 2, a fifth of them 0; junk where nothing is trained."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0, 2, case.mask.shape) * (rng.random(case.mask.shape) > 0.2)
    return np.where(case.mask, weights, np.nan)


@pytest.mark.parametrize("name", NAMES)
def test_weights_multiply_the_gradient_of_each_token(name: str) -> None:
    case = make_case(8, 12, 7)
    weights = random_weights(case)
    plain, weighted = run(build_preset(name), case), run(build_preset(name), case, weights=weights)
    expected = np.where(case.mask, weights, 0) * plain.logprob_gradient
    np.testing.assert_allclose(weighted.logprob_gradient, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert np.abs(plain.logprob_gradient).max() > 1e-3, "there is to be a gradient"
    assert weighted.metrics == plain.metrics


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_one_change_nothing(name: str) -> None:
    """To the bit, also in the precision of production."""
    case = make_case(9, 12, 7)
    for dtype in (torch.float64, torch.float32):
        plain = run(build_preset(name), case, dtype=dtype)
        weighted = run(build_preset(name), case, dtype=dtype, weights=np.ones(case.mask.shape))
        assert weighted.loss == plain.loss
        np.testing.assert_array_equal(weighted.logprob_gradient, plain.logprob_gradient)
        np.testing.assert_array_equal(weighted.entropy_gradient, plain.entropy_gradient)


@pytest.mark.parametrize("name", NAMES)
def test_splits_into_micro_batches_agree(name: str) -> None:
    case = make_case(10, 12, 7)
    weights = random_weights(case)
    whole = run(build_preset(name), case, weights=weights)
    assert_same(run(build_preset(name), case, weights=weights, parts=3), whole)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio_gradient", ["full", "stop_gradient"])
@pytest.mark.parametrize("ratio", ["token", "sequence-geometric"])
def test_tepo_against_the_written_out_loss(ratio: str, ratio_gradient: str, aggregation: str) -> None:
    """-c min(s A, clip(s) A) + beta c KL M - lambda c H, with s = sg[w] pi / sg[pi] (GSPO-token)."""
    case = make_case(11, 12, 7)
    weights = random_weights(case)
    options = {"kl_coefficient": 0.3, "entropy_bonus": 0.2, "aggregation": aggregation}
    objective = build_preset("tepo", ratio=ratio, ratio_gradient=ratio_gradient, **options)
    actual = run(objective, case, weights=weights)
    loss, gradient, entropy_gradient = written_out(case, weights, ratio, aggregation)
    assert actual.loss == pytest.approx(loss, rel=TOLERANCE)
    np.testing.assert_allclose(actual.logprob_gradient, gradient, rtol=1e-10, atol=TOLERANCE)
    np.testing.assert_allclose(actual.entropy_gradient, entropy_gradient, rtol=1e-10, atol=TOLERANCE)


def written_out(
    case: Case, weights: np.ndarray, ratio: str, aggregation: str
) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss and gradients, token by token in float64; autograd sees nothing but the stop-gradient form."""
    logprobs = torch.tensor(case.logprobs, requires_grad=True)
    entropy = torch.tensor(case.entropy, requires_grad=True)
    tokens_of_group = {g: int(case.mask[case.groups == g].sum()) for g in case.groups}
    groups = sum(count > 0 for count in tokens_of_group.values())
    responses = int(case.mask.any(1).sum())
    total = logprobs.new_zeros(())
    for i, t in case.valid:
        length = int(case.mask[i].sum())
        d = [
            case.logprobs[i, u] - case.old_logprobs[i, u]
            for u in range(case.mask.shape[1])
            if case.mask[i, u]
        ]
        own = case.logprobs[i, t] - case.old_logprobs[i, t]
        w = math.exp(own if ratio == "token" else sum(d) / length)
        s = w * (logprobs[i, t] - case.logprobs[i, t]).exp()
        advantage = case.advantages[i, t]
        surrogate = torch.minimum(s * advantage, s.clamp(0.8, 1.2) * advantage)
        gap = logprobs[i, t] - case.old_logprobs[i, t]
        kl = (-gap).exp() + gap - 1
        masked = advantage > 0 and case.entropy[i, t] < case.old_entropy[i, t]
        term = weights[i, t] * (-surrogate + 0.3 * kl * masked - 0.2 * entropy[i, t])
        total = (
            total
            + term
            / {
                "token-mean": len(case.valid),
                "group-token-mean": tokens_of_group[case.groups[i]] * groups,
                "seq-mean-token-mean": length * responses,
                "seq-mean-token-sum": responses,
                "seq-mean-token-sum-norm": responses * MAX_LENGTH,
            }[aggregation]
        )
    total.backward()
    return total.item(), logprobs.grad.numpy(), entropy.grad.numpy()


def test_terms_would_only_get_the_mean_of_the_weights() -> None:
    """What the stop-gradient form is for: to weigh the terms of a full-gradient ratio gives every token of a
    response the same factor."""
    case = make_case(12, 1, 6, density=1.0, spread=0.0)
    case = replace(case, advantages=np.ones_like(case.advantages))
    weights = np.array([[0.0, 2.0, 1.0, 0.5, 2.0, 0.5]])
    plain = run(build_preset("tepo"), case).logprob_gradient
    weighted = run(build_preset("tepo"), case, weights=weights).logprob_gradient
    np.testing.assert_allclose(weighted / plain, weights, rtol=TOLERANCE)

    logprobs = torch.tensor(case.logprobs, requires_grad=True)
    w = (logprobs - torch.tensor(case.old_logprobs)).mean().exp()
    (-(torch.tensor(weights) * w).sum() / 6).backward()
    np.testing.assert_allclose(logprobs.grad.numpy() / plain, np.full((1, 6), weights.mean()), rtol=TOLERANCE)


def test_a_weight_of_zero_drops_a_token_whose_gradient_is_not_finite() -> None:
    """0 * NaN is NaN: the token must not be multiplied, but left out."""
    case = make_case(13, 2, 4, density=1.0)
    leaf = torch.tensor(case.logprobs, requires_grad=True)
    weights = torch.ones(case.mask.shape, dtype=torch.float64)
    weights[0, 1] = 0
    tokens = replace(token_batch(case), logprobs=leaf, token_weights=weights)
    factor = torch.ones_like(weights)
    factor[0, 1] = torch.nan
    (tokens.logprobs * factor).sum().backward()
    assert leaf.grad.isfinite().all() and leaf.grad[0, 1] == 0
