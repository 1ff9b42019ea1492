"""Reward 1 for a response whose last result is the right integer, whatever stands before it."""

from tepo_nemo.reward.exact_answer import exact_answer
from tepo_nemo.reward.result import RewardResult, in_process


@in_process
def last_answer(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """Grades what stands after the last `=` as `exact_answer` does; a response without one as a whole.

    Raises:
        UserError: `gold` is not an integer.
    """
    return exact_answer(prompt, response_text.rpartition("=")[2], gold, metadata)
