"""Random mini-batches, the shipped presets, and running an objective over a mini-batch as a trainer would."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from hypothesis import strategies as st

from tepo_nemo.objectives import (
    MinibatchStatistics,
    MinibatchTotals,
    Objective,
    RolloutTokens,
    TokenBatch,
    build,
)

PRESETS = Path(__file__).parents[2] / "configs" / "algorithm"
SHARED_KEYS = {"name", "advantage", "overlong_fraction", "dynamic_sampling", "max_generation_batches"}
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


def build_preset(name: str, **options: Any) -> Objective:
    """The objective of a shipped preset, with some of its options changed."""
    method = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())["name"]
    return build(method, preset(name) | options)


@dataclass(frozen=True)
class Case:
    """A mini-batch as float64 arrays [S, T]; masked cells hold junk. The draws are 0 where none are given."""

    logprobs: np.ndarray
    old_logprobs: np.ndarray
    reference_logprobs: np.ndarray
    entropy: np.ndarray
    old_entropy: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    groups: np.ndarray  # [S]
    draws: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.draws is None:
            object.__setattr__(self, "draws", np.zeros(self.mask.shape))

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
        draws=rng.random(shape),
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


def on_meta(batch: TokenBatch) -> TokenBatch:
    """The same shapes without a value, every field given: reading one, or another device, would raise."""
    fields = vars(batch) | {
        "selected": torch.zeros_like(batch.mask),
        "token_weights": torch.ones_like(batch.logprobs),
    }
    return TokenBatch(**{name: value.to("meta") for name, value in fields.items()})


def select(objective: Objective, case: Case, counts: MinibatchTotals) -> np.ndarray:
    """What the objective selects, [S, T] bool, by its own scores; the rest is sorting in plain Python."""
    scores = objective.selection_scores(token_batch(case), counts.statistics, torch.tensor(case.draws))
    candidates = [cell for cell in case.valid if scores[cell] > -np.inf]
    best = sorted(candidates, key=lambda cell: (-scores[cell].item(), cell))
    selected = np.zeros(case.mask.shape, bool)
    for cell in best[: objective.selection_count(counts.tokens)]:
        selected[cell] = True
    return selected


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
    weights: np.ndarray | None = None,
) -> Result:
    """Loss, gradients and metrics over the mini-batch, split over micro-batches of whole responses.

    Args:
        weights: [S, T], those of the tokens; None for none.
    """
    counts = totals(case, statistics=objective.needs_minibatch_statistics, dtype=dtype)
    selected = select(objective, case, counts) if objective.needs_selection else None
    loss, gradients, metrics = 0.0, [], {}
    for numbers in np.array_split(np.arange(case.mask.shape[0]), parts):
        rows = slice(numbers[0], numbers[-1] + 1) if len(numbers) else slice(0, 0)
        part = case.rows(rows)
        leaves = [
            torch.tensor(values, dtype=dtype, requires_grad=True) for values in (part.logprobs, part.entropy)
        ]
        batch = replace(
            token_batch(part, case, dtype),
            logprobs=leaves[0],
            entropy=leaves[1],
            selected=None if selected is None else torch.tensor(selected[rows]),
            token_weights=None if weights is None else torch.tensor(weights[rows], dtype=dtype),
        )
        output = objective(batch, counts)
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


def run_shaped(objective: Objective, case: Case) -> Result:
    """The mini-batch taken as a whole rollout: a response's advantage is that of its first trained token."""
    if not objective.shapes_advantages:
        return run(objective, case)
    first = case.mask.argmax(1)
    advantages = np.where(case.mask.any(1), case.advantages[np.arange(len(first)), first], 0)
    rollout = RolloutTokens(
        *map(torch.tensor, (case.old_logprobs, case.old_entropy, advantages, advantages > 0, case.groups)),
        mask=torch.tensor(case.mask),
        reference_logprobs=torch.tensor(case.reference_logprobs),
    )
    return run(objective, replace(case, advantages=objective.shape_advantages(rollout).numpy()))


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
