"""The objectives once more, in float64 and plain loops over tokens, written from the formulas of the papers.

Values and gradients are written out by hand, one token at a time, so that nothing here shares a tensor
operation, a mask or automatic differentiation with the code under test.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from hypothesis import strategies as st

from tepo_nemo.objectives import MinibatchStatistics, MinibatchTotals, Objective, TokenBatch

PRESETS = Path(__file__).parents[2] / "configs" / "algorithm"
SHARED_KEYS = {"name", "advantage", "dynamic_sampling", "max_generation_batches"}
AGGREGATIONS = [
    "token-mean",
    "group-token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
]
MAX_LENGTH = 16


def preset(name: str) -> dict:
    """The options of a shipped preset, without the keys that all methods share."""
    values = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    return {key: value for key, value in values.items() if key not in SHARED_KEYS}


@dataclass(frozen=True)
class Case:
    """A mini-batch as float64 arrays [S, T]; masked cells hold junk."""

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    reference_logprobs: np.ndarray
    entropy: np.ndarray
    old_entropy: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    groups: np.ndarray  # [S]

    @property
    def valid(self) -> list[tuple[int, int]]:
        return [
            (i, t) for i in range(self.mask.shape[0]) for t in range(self.mask.shape[1]) if self.mask[i, t]
        ]

    def rows(self, rows: slice) -> "Case":
        return Case(**{name: value[rows] for name, value in vars(self).items()})


def make_case(
    seed: int,
    responses: int,
    positions: int,
    *,
    spread: float = 0.3,
    density: float = 0.7,
    shaped: bool = False,
) -> Case:
    """Random mini-batch; `spread` scales the log-ratios, `shaped` lets advantages vary inside a response."""
    rng = np.random.default_rng(seed)
    shape = (responses, positions)
    old = -rng.exponential(1.0, shape)
    advantages = rng.normal(size=shape if shaped else (responses, 1)) * rng.integers(0, 2, (responses, 1))
    case = Case(
        logprobs=old + spread * rng.normal(size=shape) + spread * rng.normal(size=(responses, 1)),
        old_logprobs=old,
        reference_logprobs=old + spread * rng.normal(size=shape),
        entropy=rng.exponential(1.0, shape),
        old_entropy=rng.exponential(1.0, shape),
        advantages=np.broadcast_to(advantages, shape).copy(),
        mask=rng.random(shape) < density,
        groups=rng.integers(0, 3, responses),
    )
    for name in ("logprobs", "old_logprobs", "reference_logprobs", "entropy", "old_entropy", "advantages"):
        junk = rng.choice([np.nan, np.inf, -np.inf, 1e30, 0.0], shape)
        case = replace(case, **{name: np.where(case.mask, getattr(case, name), junk)})
    return case


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """On-policy to far beyond the clamp; dense masks, sparse ones with empty responses, and none at all."""
    return make_case(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(1, 5)),
        draw(st.integers(1, 6)),
        spread=draw(st.sampled_from([0.0, 1e-3, 0.3, 3.0, 40.0])),
        density=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        shaped=draw(st.booleans()),
    )


def totals(case: Case, *, statistics: bool = False, dtype: torch.dtype = torch.float64) -> MinibatchTotals:
    valid = case.valid
    means = None
    if statistics:
        count = max(len(valid), 1)
        means = MinibatchStatistics(
            torch.tensor(sum(case.advantages[cell] for cell in valid) / count, dtype=dtype),
            torch.tensor(sum(case.logprobs[cell] for cell in valid) / count, dtype=dtype),
        )
    return MinibatchTotals(
        tokens=len(valid),
        responses=len({i for i, _ in valid}),
        groups=len({case.groups[i] for i, _ in valid}),
        max_response_length=MAX_LENGTH,
        statistics=means,
    )


def group_tokens(case: Case) -> np.ndarray:
    return np.array(
        [sum(case.groups[j] == group for j, _ in case.valid) for group in case.groups], dtype=float
    )


def token_batch(case: Case, whole: Case | None = None, dtype: torch.dtype = torch.float64) -> TokenBatch:
    """`case` as the objective takes it; `whole` is the mini-batch it is a part of."""
    whole = whole or case
    per_group = dict(zip(whole.groups, group_tokens(whole), strict=True))

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return TokenBatch(
        logprobs=tensor(case.logprobs),
        entropy=tensor(case.entropy),
        old_logprobs=tensor(case.old_logprobs),
        old_entropy=tensor(case.old_entropy),
        advantages=tensor(case.advantages),
        mask=torch.tensor(case.mask),
        group_tokens=tensor([per_group[group] for group in case.groups]),
        reference_logprobs=tensor(case.reference_logprobs),
    )


@dataclass(frozen=True)
class Result:
    loss: float
    logprob_gradient: np.ndarray  # [S, T]
    entropy_gradient: np.ndarray  # [S, T]
    metrics: dict[str, tuple[float, float]]


def run(
    objective: Objective,
    case: Case,
    *,
    parts: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Result:
    """Loss, gradients and metrics over the mini-batch, split over micro-batches of whole responses."""
    counts = totals(case, statistics=objective.needs_minibatch_statistics, dtype=dtype)
    loss, gradients, metrics = 0.0, [], {}
    for rows in np.array_split(np.arange(case.mask.shape[0]), parts):
        part = case.rows(slice(rows[0], rows[-1] + 1) if len(rows) else slice(0, 0))
        leaves = [
            torch.tensor(values, dtype=dtype, requires_grad=True) for values in (part.logprobs, part.entropy)
        ]
        output = objective(
            replace(token_batch(part, case, dtype), logprobs=leaves[0], entropy=leaves[1]), counts
        )
        output.loss.backward()
        loss += output.loss.item()
        gradients.append(
            [np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.double().numpy() for leaf in leaves]
        )
        for name, mean in output.metrics.items():
            assert not mean.numerator.requires_grad and mean.numerator.dim() == mean.denominator.dim() == 0
            numerator, denominator = metrics.get(name, (0.0, 0.0))
            metrics[name] = (numerator + mean.numerator.item(), denominator + mean.denominator.item())
    return Result(loss, *(np.concatenate(parts) for parts in zip(*gradients, strict=True)), metrics)


def assert_same(actual: Result, expected: Result, tolerance: float = 1e-10) -> None:
    scale = max(1.0, np.abs(expected.logprob_gradient).max(initial=0))
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(
        actual.logprob_gradient, expected.logprob_gradient, rtol=tolerance, atol=tolerance * scale
    )
    np.testing.assert_allclose(
        actual.entropy_gradient, expected.entropy_gradient, rtol=tolerance, atol=tolerance
    )
    assert actual.metrics.keys() == expected.metrics.keys()
    for name, pair in expected.metrics.items():
        np.testing.assert_allclose(
            actual.metrics[name], pair, rtol=tolerance, atol=tolerance * 10, err_msg=name
        )


# --- the formulas ---------------------------------------------------------------------------------


def bounded_exp(x: float) -> tuple[float, float]:
    """exp of x clamped to [-20, 20], and its derivative by x."""
    if x > 20:
        return math.exp(20), 0.0
    if x < -20:
        return math.exp(-20), 0.0
    return math.exp(x), math.exp(x)


def ratios(d: list[float], kind: str, gradient: str) -> tuple[list[float], np.ndarray]:
    """Ratio of each token of one response, and its derivative by each token's log-probability."""
    n = len(d)
    values, jacobian = [], np.zeros((n, n))
    for t in range(n):
        exponent = {
            "token": d[t],
            "sequence-geometric": sum(d) / n,
            "sequence-product": sum(d),
            "none": 0.0,
        }[kind]
        value, slope = bounded_exp(exponent)
        values.append(value)
        if kind in ("token", "none") or gradient == "stop_gradient":
            jacobian[t, t] = slope
        else:
            jacobian[t, :] = slope / n if kind == "sequence-geometric" else slope
    return values, jacobian


def surrogate(
    form: str, w: float, a: float, low: float, high: float, dual: float | None = None
) -> tuple[float, float, bool]:
    """Surrogate of one token by cases, its derivative by the ratio, and whether the clip cut it."""
    if form == "printed":
        return (w * a, a, False) if w <= 1 + high else ((1 + high) * a, 0.0, a != 0)
    if a > 0 and w > 1 + high:
        return (1 + high) * a, 0.0, True
    if a < 0 and w < 1 - low:
        return (1 - low) * a, 0.0, True
    if a < 0 and dual is not None and w > dual:
        return dual * a, 0.0, True
    return w * a, a, False


def kl(d: float, estimator: str) -> tuple[float, float]:
    """KL estimate of one token and the derivative that the method uses."""
    inside = float(-20 <= d <= 20)
    d = min(max(d, -20.0), 20.0)
    value, slope = {
        "k1": (d, d),
        "k2": (d * d / 2, d),
        "k3": (math.exp(-d) + d - 1, 1 - math.exp(-d)),
        "abs": (abs(d), float(np.sign(d))),
    }[estimator]
    return value, slope * inside


def token_weight(case: Case, i: int, aggregation: str) -> float:
    """What one token of response i weighs in the mini-batch loss."""
    valid = case.valid
    responses = len({j for j, _ in valid})
    if aggregation == "token-mean":
        return 1 / len(valid)
    if aggregation == "group-token-mean":
        in_group = sum(case.groups[j] == case.groups[i] for j, _ in valid)
        return 1 / in_group / len({case.groups[j] for j, _ in valid})
    if aggregation == "seq-mean-token-mean":
        return 1 / sum(j == i for j, _ in valid) / responses
    if aggregation == "seq-mean-token-sum":
        return 1 / responses
    return 1 / responses / MAX_LENGTH


def in_kl_mask(case: Case, cell: tuple[int, int], options: dict) -> bool:
    if options["kl_mask"] != "tepo":
        return options["kl_mask"] == "all"
    valid = case.valid
    a, logp = case.advantages[cell], case.logprobs[cell]
    match options["entropy_drop"]:
        case "entropy":
            drops = case.entropy[cell] - case.old_entropy[cell] < -options["entropy_drop_tolerance"]
        case "surprisal":
            drops = -(logp - case.old_logprobs[cell]) < -options["entropy_drop_tolerance"]
        case "covariance":
            mean_a = sum(case.advantages[other] for other in valid) / len(valid)
            mean_logp = sum(case.logprobs[other] for other in valid) / len(valid)
            drops = (a - mean_a) * (logp - mean_logp) > options["entropy_drop_tolerance"]
    return bool(a > 0 and drops)


def reference(case: Case, options: dict) -> Result:
    """TEPO or GRPO (told apart by `ratio`, an option that only TEPO has), one token after the other."""
    is_tepo = "ratio" in options
    loss = 0.0
    gradient, entropy_gradient = np.zeros(case.mask.shape), np.zeros(case.mask.shape)
    sums = dict.fromkeys(
        ("ratio", "clipped", "kl", "kl_masked", "masked", "entropy", "delta", "reference"), 0.0
    )
    for i in range(case.mask.shape[0]):
        cells = [cell for cell in case.valid if cell[0] == i]
        d = [case.logprobs[cell] - case.old_logprobs[cell] for cell in cells]
        w, jacobian = ratios(d, options.get("ratio", "token"), options.get("ratio_gradient", "full"))
        for n, cell in enumerate(cells):
            weight = token_weight(case, i, options["aggregation"])
            gain, slope, cut = surrogate(
                options.get("surrogate", "ppo"), w[n], case.advantages[cell],
                options["clip_low"], options["clip_high"], options.get("dual_clip"),
            )  # fmt: skip
            loss -= weight * gain
            for m, other in enumerate(cells):
                gradient[other] -= weight * slope * jacobian[n, m]

            kl_old, kl_old_slope = kl(d[n], options["kl_estimator"])
            if is_tepo:
                masked = in_kl_mask(case, cell, options)
                loss += weight * options["kl_coefficient"] * kl_old * masked
                gradient[cell] += weight * options["kl_coefficient"] * kl_old_slope * masked
                loss -= weight * options["entropy_bonus"] * case.entropy[cell]
                entropy_gradient[cell] -= weight * options["entropy_bonus"]
            else:
                masked = False
                kl_ref, kl_ref_slope = kl(
                    case.logprobs[cell] - case.reference_logprobs[cell], options["kl_estimator"]
                )
                loss += weight * options["kl_coefficient"] * kl_ref
                gradient[cell] += weight * options["kl_coefficient"] * kl_ref_slope
                sums["reference"] += kl_ref

            sums["ratio"] += w[n]
            sums["clipped"] += cut
            sums["kl"] += kl_old
            sums["kl_masked"] += kl_old * masked
            sums["masked"] += masked
            sums["entropy"] += case.entropy[cell]
            sums["delta"] += case.entropy[cell] - case.old_entropy[cell]

    tokens = len(case.valid)
    metrics = {
        "ratio/mean": (sums["ratio"], tokens),
        "ratio/clip_fraction": (sums["clipped"], tokens),
        "kl/mean": (sums["kl"], tokens),
        "kl/masked_mean": (sums["kl_masked"], sums["masked"]),
        "mask/fraction": (sums["masked"], tokens),
        "entropy/mean": (sums["entropy"], tokens),
        "entropy/delta_mean": (sums["delta"], tokens),
    }
    if not is_tepo and options["kl_coefficient"] > 0:
        metrics["kl/reference_mean"] = (sums["reference"], tokens)
    return Result(loss, gradient, entropy_gradient, metrics)
