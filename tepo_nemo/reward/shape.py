"""Rewards for how a response is written. They are parts of a composition: alone they teach no mathematics."""

import re

from tepo_nemo.data.boxed import last_box
from tepo_nemo.reward.result import RewardResult, in_process

_THOUGHT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)*", re.DOTALL)


@in_process
def boxed(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """1 for a response that ends with a closed box that is not empty, else 0."""
    box = last_box(response_text)
    return RewardResult(float(bool(box and box.strip())), "ok")


@in_process
def thinks_first(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """1 for a response of one `<think>...</think>` and what follows it, else 0."""
    return RewardResult(float(_THOUGHT.fullmatch(response_text) is not None), "ok")


@in_process
def short(
    prompt: str, response_text: str, gold: str, metadata: dict, *, characters: int = 8000
) -> RewardResult:
    """Falls linearly from 1 for an empty response to 0 for one of `characters` and more.

    A penalty near the limit of generated tokens is `algorithm.overlong_fraction`, which knows the tokens.
    """
    return RewardResult(max(0.0, 1.0 - len(response_text) / characters), "ok")
