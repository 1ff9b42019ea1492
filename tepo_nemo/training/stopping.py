"""Stopping on all ranks at once."""

from collections.abc import Callable

from tepo_nemo.runs.stop import StopFlag, Stopped


class StopCheck:
    """Called between rollout chunks, updates and evaluation batches; all ranks call it at the same points.

    Args:
        flag: of this process.
        max_over_ranks: of `Policy`.
    """

    def __init__(self, flag: StopFlag, max_over_ranks: Callable[[int], int]) -> None:
        self._flag = flag
        self._max_over_ranks = max_over_ranks

    def __call__(self) -> None:
        """Raise Stopped on every rank where any of them was asked to stop."""
        if reason := self._max_over_ranks(self._flag.value):
            raise Stopped(StopFlag.REASONS[reason])
