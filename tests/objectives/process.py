"""Rollouts, and advantages of tokens from the formulas in plain loops over groups, responses and buckets."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from tepo_nemo.objectives import RolloutTokens

DELTA = 1e-6
OPTIONS = {
    "process_scale": st.sampled_from([0.0, 0.1, 1.0]),
    "gate_sharpness": st.sampled_from([0.0, 1.0, 5.0]),
    "buckets": st.sampled_from([1, 2, 3, 8]),
    "process_std": st.sampled_from([0.0, 0.5, 1.0]),
    "process_weight": st.sampled_from([0.0, 0.3, 2.0]),
}


class Response(NamedTuple):
    """One response: |o| values each."""

    group: int
    reward: float
    advantage: float
    old_logprobs: Sequence[float]
    old_entropy: Sequence[float]
    reference_logprobs: Sequence[float]


def to_rollout(responses: Sequence[Response], width: int | None = None) -> RolloutTokens:
    """Padded with junk."""
    width = width or max(len(response.old_entropy) for response in responses)

    def padded(values: Iterable[Sequence[float]]) -> torch.Tensor:
        return torch.tensor(
            [[*row, *[math.nan] * (width - len(row))] for row in values], dtype=torch.float64
        ).view(-1, width)

    return RolloutTokens(
        old_logprobs=padded(response.old_logprobs for response in responses),
        old_entropy=padded(response.old_entropy for response in responses),
        reference_logprobs=padded(response.reference_logprobs for response in responses),
        advantages=torch.tensor([response.advantage for response in responses], dtype=torch.float64),
        rewards=torch.tensor([response.reward for response in responses], dtype=torch.float64),
        groups=torch.tensor([response.group for response in responses]),
        mask=torch.tensor([[t < len(response.old_entropy) for t in range(width)] for response in responses]),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> list[Response]:
    """Groups of any size, interleaved; with spread, without, and with responses that are not trained on."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    moved = draw(st.sampled_from([0.0, 0.3, 3.0]))  # how far from the reference
    correct = draw(st.sampled_from([0.0, 0.5, 1.0]))
    responses = []
    for _ in range(draw(st.integers(1, 9))):
        group, length = int(rng.integers(0, 3)), int(rng.integers(0, draw(st.sampled_from([2, 8]))))
        logprobs = -rng.exponential(1.0, length)
        responses.append(
            Response(
                group=[7, -3, 2**40][group],
                reward=float(rng.random() < correct),
                advantage=float(rng.normal()) if draw(st.booleans()) else 0.0,
                old_logprobs=logprobs.tolist(),
                old_entropy=(rng.exponential(1.0, length) * draw(st.sampled_from([0.0, 1.0]))).tolist(),
                reference_logprobs=(logprobs + moved * rng.normal(size=length)).tolist(),
            )
        )
    return responses


def moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation; equal values have exactly none."""
    mean = math.fsum(values) / len(values)
    if max(values) == min(values):
        return values[0], 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def shaped(
    responses: Sequence[Response],
    options: dict,
    bucket: Callable[[Response, int], int],
    direction: Callable[[Response, list[Response]], float],
) -> list[list[float]]:
    """The advantage of each token of each response."""
    result = [[0.0] * len(response.old_entropy) for response in responses]
    for name in {response.group for response in responses}:
        members = [response for response in responses if response.group == name and response.old_entropy]
        cells = [
            (row, t)
            for row, response in enumerate(responses)
            for t in range(len(response.old_entropy))
            if response.group == name
        ]
        if not cells:
            continue
        entropy_mean, entropy_std = moments([responses[row].old_entropy[t] for row, t in cells])
        signals, buckets = {}, {}
        for row, t in cells:
            response = responses[row]
            signals[row, t] = options["process_scale"] * (
                response.old_logprobs[t] - response.reference_logprobs[t]
            )
            buckets.setdefault(bucket(response, t), []).append((row, t))
        gated = {}
        for inside in buckets.values():
            mean, std = moments([signals[cell] for cell in inside])
            for row, t in inside:
                z = (responses[row].old_entropy[t] - entropy_mean) / (entropy_std + DELTA)
                gate = 1 / (1 + math.exp(-options["gate_sharpness"] * z))
                compared = (signals[row, t] - mean) / (std + DELTA)
                gated[row, t] = gate * direction(responses[row], members) * compared
        nonzero = [value for value in gated.values() if value != 0]
        spread = moments(nonzero)[1] if nonzero else 0.0
        total = {}
        for row, t in cells:
            process = options["process_std"] * gated[row, t] / (spread + DELTA)
            total[row, t] = responses[row].advantage + options["process_weight"] * process
        mean, std = moments(list(total.values()))
        for (row, t), value in total.items():
            result[row][t] = (value - mean) / (std + DELTA)
    return result


def assert_shaped(actual: torch.Tensor, expected: Sequence[Sequence[float]], tolerance: float = 1e-7) -> None:
    """Equal on the tokens, and 0 past the end of a response."""
    for row, values in zip(actual.tolist(), expected, strict=True):
        np.testing.assert_allclose(row[: len(values)], values, rtol=tolerance, atol=tolerance)
        assert not any(row[len(values) :])
