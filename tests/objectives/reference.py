"""The objectives once more, in float64 and plain loops over tokens, written from the formulas of the papers.

Values and gradients are written out by hand, one token at a time, so that nothing here shares a tensor
operation, a mask or automatic differentiation with the code under test.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from objectives.cases import MAX_LENGTH, Case, Result


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


def covariance(case: Case, cell: tuple[int, int]) -> float:
    """(A - mean A)(logp - mean logp), the means over all trained tokens."""
    valid = case.valid
    mean_a = sum(case.advantages[other] for other in valid) / len(valid)
    mean_logp = sum(case.logprobs[other] for other in valid) / len(valid)
    return (case.advantages[cell] - mean_a) * (case.logprobs[cell] - mean_logp)


def in_kl_mask(case: Case, cell: tuple[int, int], options: dict) -> bool:
    if options["kl_mask"] != "tepo":
        return options["kl_mask"] == "all"
    a, logp = case.advantages[cell], case.logprobs[cell]
    match options["entropy_drop"]:
        case "entropy":
            drops = case.entropy[cell] - case.old_entropy[cell] < -options["entropy_drop_tolerance"]
        case "surprisal":
            drops = -(logp - case.old_logprobs[cell]) < -options["entropy_drop_tolerance"]
        case "covariance":
            drops = covariance(case, cell) > options["entropy_drop_tolerance"]
    return bool(a > 0 and drops)


class Term(NamedTuple):
    """One token: its loss with all derivatives, and what the metrics count of it."""

    loss: float
    slopes: Sequence[float]  # of the loss, by the log-probability of each trained token of the response
    ratio: float
    cut: bool = False
    masked: bool = False  # in the KL mask
    entropy_slope: float = 0.0  # of the loss, by the token's entropy


def summed(
    case: Case,
    terms: Callable[[list[tuple[int, int]]], Iterable[Term]],
    aggregation: str,
    kl_estimator: str = "k3",
) -> Result:
    """A mini-batch from the terms of each response, given the cells of its trained tokens in order."""
    loss = 0.0
    gradient, entropy_gradient = np.zeros(case.mask.shape), np.zeros(case.mask.shape)
    sums = dict.fromkeys(("ratio", "clipped", "kl", "kl_masked", "masked", "entropy", "delta"), 0.0)
    for i in range(case.mask.shape[0]):
        cells = [cell for cell in case.valid if cell[0] == i]
        for cell, term in zip(cells, terms(cells), strict=True):
            weight = token_weight(case, i, aggregation)
            loss += weight * term.loss
            entropy_gradient[cell] += weight * term.entropy_slope
            for other, slope in zip(cells, term.slopes, strict=True):
                gradient[other] += weight * slope

            kl_old, _ = kl(case.logprobs[cell] - case.old_logprobs[cell], kl_estimator)
            sums["ratio"] += term.ratio
            sums["clipped"] += term.cut
            sums["kl"] += kl_old
            sums["kl_masked"] += kl_old * term.masked
            sums["masked"] += term.masked
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
    return Result(loss, gradient, entropy_gradient, metrics)


def reference(case: Case, options: dict) -> Result:
    """TEPO or GRPO (told apart by `ratio`, an option that only TEPO has), one token after the other."""
    is_tepo = "ratio" in options
    beta, estimator = options["kl_coefficient"], options["kl_estimator"]
    reference_kl = 0.0

    def terms(cells: list[tuple[int, int]]) -> Iterator[Term]:
        nonlocal reference_kl
        d = [case.logprobs[cell] - case.old_logprobs[cell] for cell in cells]
        w, jacobian = ratios(d, options.get("ratio", "token"), options.get("ratio_gradient", "full"))
        for n, cell in enumerate(cells):
            gain, slope, cut = surrogate(
                options.get("surrogate", "ppo"), w[n], case.advantages[cell],
                options["clip_low"], options["clip_high"], options.get("dual_clip"),
            )  # fmt: skip
            if is_tepo:
                masked, bonus = in_kl_mask(case, cell, options), options["entropy_bonus"]
                value, kl_slope = kl(d[n], estimator)
                value, kl_slope = value * masked, kl_slope * masked
            else:
                masked, bonus = False, 0.0
                value, kl_slope = kl(case.logprobs[cell] - case.reference_logprobs[cell], estimator)
                reference_kl += value
            slopes = -slope * jacobian[n]
            slopes[n] += beta * kl_slope
            loss = -gain + beta * value - bonus * case.entropy[cell]
            yield Term(loss, slopes, w[n], cut, masked, -bonus)

    result = summed(case, terms, options["aggregation"], estimator)
    if not is_tepo and beta > 0:
        result.metrics["kl/reference_mean"] = (reference_kl, len(case.valid))
    return result
