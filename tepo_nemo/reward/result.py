"""A reward is a value with a status, so that a broken grader is never taken for a wrong answer."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Status = Literal["ok", "unparseable", "timeout", "error"]


@dataclass(frozen=True)
class RewardResult:
    """The grading of one response.

    `ok` and `unparseable` are verdicts and vote in the statistics of their group (an answer that cannot be
    read is a wrong one). `timeout` and `error` are failures of the grading: they do not vote, their responses
    are not trained on, and their value means nothing.
    """

    value: float
    status: Status
    extracted: str | None = None  # the answer that was found in the response
    correctness: float | None = None  # where the value holds more than that; None: the value is it

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise ValueError(f"reward status {self.status!r} is not one of {get_args(Status)}")
        for name, value in (("value", self.value), ("correctness", self.correct)):
            if not math.isfinite(value):
                raise ValueError(f"reward {name} {value} is not finite")

    @property
    def failed(self) -> bool:
        return self.status in ("timeout", "error")

    @property
    def correct(self) -> float:
        """How right the answer is, whatever else is rewarded."""
        return self.value if self.correctness is None else self.correctness


RewardFunction = Callable[[str, str, str, dict], RewardResult]  # prompt, response text, gold, metadata


def in_process(function: RewardFunction) -> RewardFunction:
    """Marks a reward that takes no time whatever the response is: it needs no process that can be killed."""
    function.in_process = True
    return function
