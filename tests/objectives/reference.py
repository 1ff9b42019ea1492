"""The objectives once more, in float64 and plain loops over tokens, written from the formulas of the papers.

Values and gradients are written out by hand, one token at a time, so that nothing here shares a tensor
operation, a mask or automatic differentiation with the code under test.
"""

import math

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
