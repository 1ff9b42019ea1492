"""Reward 1 for a response that is the right integer and nothing else."""

import re

from tepo_nemo.errors import UserError
from tepo_nemo.reward.result import RewardResult, in_process

_INTEGER = re.compile(r"([+-]?)([0-9]+)")  # not \d, which takes the digits of every script


@in_process
def exact_answer(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """Compares integers: white space around them, a plus sign and zeros in front do not matter (`+007` is 7).

    A response that is anything else is unparseable and worth 0. A truncated response is graded by its text
    like any other. Integers are compared as text, so that none is too long.

    Raises:
        UserError: `gold` is not an integer; the data is wrong, or this is not the reward for it.
    """
    expected = _canonical_integer(gold)
    if expected is None:
        raise UserError(
            f"gold {gold!r} of prompt {prompt!r} is not an integer; repair it or choose another data.reward"
        )
    answer = _canonical_integer(response_text)
    if answer is None:
        return RewardResult(0.0, "unparseable")
    return RewardResult(float(answer == expected), "ok", extracted=answer)


def _canonical_integer(text: str) -> str | None:
    match = _INTEGER.fullmatch(text.strip())
    if match is None:
        return None
    sign, digits = match[1], match[2].lstrip("0")
    if not digits:
        return "0"
    return f"-{digits}" if sign == "-" else digits
