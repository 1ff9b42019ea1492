"""What a check says."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

State: TypeAlias = Literal["ok", "warning", "problem"]
"""A problem stops a run or spoils it; a warning may slow it down, or has not been tested."""


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    check: str
    state: State
    found: str
    advice: str = ""  # what to do; empty where all is well


def finding(check: str, found: str, *, problem: str = "", warning: str = "") -> Finding:
    """A problem or a warning where there is advice against one, or else a line that says ok."""
    if problem:
        return Finding(check, "problem", found, problem)
    return Finding(check, "warning" if warning else "ok", found, warning)
