"""Decides about every update before the weights move: one that is broken, or that stands out, is skipped.

The decision rests on what is the same on every rank, and so it is the same on every rank.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from tepo_nemo.runs.directory import bad_update_name
from tepo_nemo.training.policy import Gradient

# What of an update must be finite, and how a person calls it; a later one may follow from an earlier one.
WATCHED = {
    "loss": "loss",
    "ratio": "importance ratio",
    "copies": "gradient of a replicated weight",
    "norm": "gradient norm",
}


@dataclass(frozen=True)
class Skip:
    """Why an update is not made."""

    reason: Literal["not_finite", "spike"]
    text: str


class BadUpdatesError(RuntimeError):
    """Too many updates in a row were skipped; the weights are those of the last good one."""


class Rewind(Exception):
    """The weights are those of an earlier step again; `state` is the trainer's of then."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__(state)
        self.state = state


class UpdateGuard:
    """What a run remembers of its updates.

    Args:
        max_bad_updates: skipped updates in a row that end the run.
        spike_factor: a gradient norm above this many times the median of the last good updates is a spike;
            None looks for none.
        spike_window: good updates whose norms are remembered; until there are as many, nothing is a spike.
    """

    def __init__(self, *, max_bad_updates: int, spike_factor: float | None, spike_window: int) -> None:
        self._max_bad_updates = max_bad_updates
        self._spike_factor = spike_factor
        self._norms: deque[float] = deque(maxlen=spike_window)
        self.in_a_row = 0
        self.rewinds = 0  # times that the run has gone back for a spike

    def judge(self, gradient: Gradient) -> Skip | None:
        """Why the update of this gradient must not be made; None where it may be."""
        skip = self._not_finite(gradient.not_finite) or self._spike(gradient.norm)
        if skip is None:
            self.in_a_row = 0
            self._norms.append(gradient.norm)
        else:
            self.in_a_row += 1
        return skip

    def check_end(self, step: int, update: int, skip: Skip) -> None:
        """Raises BadUpdatesError where a skipped update, counted from 1 as its step is, is one too many."""
        if self.in_a_row < self._max_bad_updates:
            return
        raise BadUpdatesError(
            f"{self.in_a_row} updates in a row were skipped (trainer.max_bad_updates), the last in step "
            f"{step}, update {update}: {skip.text}; its rollout is in {bad_update_name(step, update)} of the "
            "run, and no checkpoint was written"
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON, for a checkpoint."""
        return {"in_a_row": self.in_a_row, "rewinds": self.rewinds, "norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.in_a_row, self.rewinds = state["in_a_row"], state["rewinds"]
        self._norms.clear()
        self._norms.extend(_newest(state["norms"], self._norms.maxlen))

    def _not_finite(self, first_ranks: dict[str, int]) -> Skip | None:
        if not first_ranks:
            return None
        broken = next(name for name in WATCHED if name in first_ranks)  # the others follow from it
        # The norm is summed over the ranks before it is looked at: where it broke is not known.
        where = "" if broken == "norm" else f" (first on rank {first_ranks[broken]})"
        return Skip("not_finite", f"{WATCHED[broken]} not finite{where}")

    def _spike(self, norm: float) -> Skip | None:
        if self._spike_factor is None or len(self._norms) < (self._norms.maxlen or 0):
            return None
        usual = median(self._norms)
        if norm <= self._spike_factor * usual:
            return None
        return Skip("spike", f"gradient norm {norm:.3g}, the median of {len(self._norms)} is {usual:.3g}")


def _newest(values: Sequence[float], count: int | None) -> Sequence[float]:
    return values if count is None else values[-count:]
