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
    """

    REASONS = ("", "its time limit", "SIGUSR1", "SIGTERM")

    def __init__(self) -> None:
        self._made = time.monotonic()
        self._limit_s: float | None = None
        self._signalled = 0

    def limit(self, seconds: float | None) -> None:
        """Stop that long after this was made; None for no limit."""
        self._limit_s = seconds

    def listen(self) -> None:
        """Take note of SIGTERM and SIGUSR1 from now on, in place of dying of them."""
        for name in ("SIGUSR1", "SIGTERM"):
            signal.signal(getattr(signal, name), self._note)

    @property
    def value(self) -> int:
        """The number of the reason in `REASONS`."""
        late = self._limit_s is not None and time.monotonic() >= self._made + self._limit_s
        return self._signalled or int(late)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = max(self._signalled, self.REASONS.index(signal.Signals(number).name))
