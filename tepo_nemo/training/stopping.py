"""Stopping on all ranks at once."""

from collections.abc import Callable

from tepo_nemo.runs.stop import StopFlag, Stopped


class StopCheck:
    """Called between rollout chunks, updates and evaluation batches; all ranks call it at the same points.

    Args:
        flag: of this process.
        max_over_ranks: of `Policy`.
        moved: told at each of these points that this rank has come to it.
    """

    def __init__(
        self, flag: StopFlag, max_over_ranks: Callable[[int], int], moved: Callable[[], None]
    ) -> None:
        self._flag = flag
        self._max_over_ranks = max_over_ranks
        self._moved = moved

    def __call__(self) -> None:
        """Raise Stopped on every rank where any of them was asked to stop."""
        self._moved()
        if reason := self._max_over_ranks(self._flag.value):
            raise Stopped(StopFlag.REASONS[reason])
