"""Rollouts and scores made by hand. Every token has an id of its own, so that none can be mixed up."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tepo_nemo.data.prompts import Prompt
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.rollout.batch import RolloutBatch, ScoredBatch, TokenizedPrompt
from tepo_nemo.rollout.protocol import Generation


class Response(NamedTuple):
    """A response to be made: its group, its reward (None: grading failed), its length, whether it was cut."""

    group: int
    reward: float | None
    length: int = 2
    truncated: bool = False


def make_prompt(number: int, length: int = 2) -> TokenizedPrompt:
    """Prompt `number`, tokens 1000 * number and on."""
    name = f"p{number}"
    tokens = [1000 * number + place for place in range(length)]
    return TokenizedPrompt(Prompt(name, f"prompt {name}", f"gold {name}"), tokens)


def make_scored(responses: Sequence[Response], first_prompt: int = 0) -> ScoredBatch:
    """Responses in the given order; token t of row r is 100 * (r + 1) + t, its log-prob minus that over 1000.

    The sample numbers count within a group. Columns past a response's length hold junk.
    """
    groups = [response.group for response in responses]
    width = max(response.length for response in responses)
    tokens = torch.arange(len(responses))[:, None] * 100 + 100 + torch.arange(width)
    return ScoredBatch(
        rollouts=RolloutBatch(
            prompts=[make_prompt(first_prompt + group) for group in range(max(groups) + 1)],
            groups=torch.tensor(groups),
            samples=torch.tensor([groups[:row].count(group) for row, group in enumerate(groups)]),
            generation=Generation(
                tokens=tokens,
                lengths=torch.tensor([response.length for response in responses]),
                finished=torch.tensor([not response.truncated for response in responses]),
                logprobs=-tokens.float() / 1000,
            ),
        ),
        texts=[f"text {row}" for row in range(len(responses))],
        results=[
            RewardResult(0.0, "timeout") if response.reward is None else RewardResult(response.reward, "ok")
            for response in responses
        ],
    )
