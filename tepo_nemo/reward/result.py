"""A reward is a value with a status, so that a broken grader is never taken for a wrong answer."""

import math
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

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise ValueError(f"reward status {self.status!r} is not one of {get_args(Status)}")
        if not math.isfinite(self.value):
            raise ValueError(f"reward value {self.value} is not finite")

    @property
    def failed(self) -> bool:
        return self.status in ("timeout", "error")
