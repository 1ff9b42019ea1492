"""What asks a run to stop: a signal, or its time limit."""

import signal
import time
from types import FrameType


class Stopped(Exception):
    """The run was asked to stop, and its text says by what. Raised on all ranks at the same point."""


class StopFlag:
    """Whether this process has been asked to stop, as a number that ranks can compare: 0 where it has not.

    The flag is only looked at, between pieces of work: a signal handler that saved would do so in the middle
    of an update.

    Args:
        limit_s: seconds from now after which to stop; None for no limit.
    """

    REASONS = ("", "its time limit", "SIGUSR1", "SIGTERM")

    def __init__(self, limit_s: float | None = None) -> None:
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._signalled = 0

    def listen(self) -> None:
        """Take note of SIGTERM and SIGUSR1 from now on, in place of dying of them."""
        for name in ("SIGUSR1", "SIGTERM"):
            signal.signal(getattr(signal, name), self._note)

    @property
    def value(self) -> int:
        """The number of the reason in `REASONS`."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return self._signalled or int(late)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = max(self._signalled, self.REASONS.index(signal.Signals(number).name))
