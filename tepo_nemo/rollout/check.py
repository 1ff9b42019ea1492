"""Whether a rollout engine is the policy under training: what is measured, and when it is too far off.

D is the trainer's log-prob of a sampled token, under the weights that the engine is to have and at the same
temperature, minus the engine's. Rounding to bf16 gives a mean |D| of about 0.01; a dropped bias, another
scaling of positions or the weights of another model give tenths and more.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo_nemo.rollout.protocol import Generation, RolloutError

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gap:
    """|D| of the sampled tokens of a step."""

    mean: float  # nats
    error: float  # mean of exp |D|
    early: float  # mean over the first half of each response
    late: float  # mean over the second half
    largest: float
    row: int  # response of the largest
    column: int  # and its place in the response
    token: int  # and its id


@dataclass(frozen=True)
class GapLimits:
    """Above `warn` a warning is logged, above `stop` the run ends."""

    warn_gap: float
    stop_gap: float
    warn_error: float
    stop_error: float


def judge(gap: Gap, limits: GapLimits, *, step: int, engine: str, temperature: float) -> None:
    """Log a warning, or raise RolloutError, with the numbers and what may be behind them.

    Args:
        step: number of the step, for the message; the first is 1.
        engine: what generates.
    """
    if not (gap.mean > limits.warn_gap or gap.error > limits.warn_error or gap.mean != gap.mean):
        return
    told = (
        f"step {step}: {engine} and the trainer differ by {gap.mean:.3g} nats in the log-prob of a sampled "
        f"token on average (rollout.check.stop_gap={limits.stop_gap:g}); exp of it is {gap.error:.3g} on "
        f"average (rollout.check.stop_error={limits.stop_error:g}); the largest difference is "
        f"{gap.largest:.3g}, at token {gap.column} (id {gap.token}) of response {gap.row}; it is "
        f"{gap.early:.3g} in the first halves of the responses and {gap.late:.3g} in the second. Likely "
        "causes: the engine has not the weights of now; it samples at another temperature than "
        f"{temperature:g}; it lacks a bias (model.qkv_bias) or the scaling of the rotary positions "
        "(model.scale_positional_embedding, model.rotary_base; the difference then grows along a response); "
        "its vocabulary is another"
    )
    if gap.mean <= limits.stop_gap and gap.error <= limits.stop_error:
        LOG.warning("%s", told)
        return
    raise RolloutError(told)


def check_samples(groups: Tensor, generation: Generation) -> None:
    """The responses of a group are drawn apart: no more of them are equal than chance makes.

    A row equals an earlier one of its group with the probability of those earlier ones, which the log-probs
    tell; so the number of such rows has an expectation and a variance.

    Args:
        groups: [R] int64, of the responses; sampled, not greedy.

    Raises:
        RolloutError: it is above its expectation by more than six standard deviations, and six.
    """
    columns = torch.arange(generation.tokens.shape[1])
    within = columns < generation.lengths[:, None]
    logprobs = torch.where(within, generation.logprobs, 0).double().sum(-1)
    seen: dict[int, dict[tuple[int, ...], float]] = {}
    equal, expected, variance = 0, 0.0, 0.0
    tokens, lengths = generation.tokens.tolist(), generation.lengths.tolist()
    for row, group in enumerate(groups.tolist()):
        if lengths[row] == 0:
            continue
        response = tuple(tokens[row][: lengths[row]])
        earlier = seen.setdefault(group, {})
        chance = min(1.0, sum(earlier.values()))
        expected, variance = expected + chance, variance + chance * (1 - chance)
        equal += response in earlier
        earlier[response] = float(logprobs[row].exp())
    if equal > expected + 6 * variance**0.5 + 6:
        raise RolloutError(
            f"{equal} of {len(groups)} responses repeat an earlier one to the same prompt, where "
            f"{expected:.1f} are to be expected: the engine gives samples the same noise, its seeds have no "
            "effect"
        )


def same_answers(before: Generation, now: Generation) -> bool:
    """Whether two answers to one request are equal to the last bit."""
    return all(
        torch.equal(getattr(before, name), getattr(now, name)) for name in ("lengths", "tokens", "logprobs")
    )
