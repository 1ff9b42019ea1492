"""An engine that hangs holds its rank for ever, and all others with it."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_FAILED = 1  # the exit code of a run that failed


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """End this process where `what` takes longer: a call into the engine cannot be interrupted."""

    def end() -> None:
        sys.stderr.write(
            f"{what} has taken more than rollout.trtllm.time_limit={seconds:g} s: it hangs, or the limit is "
            "too low; the run ends\n"
        )
        sys.stderr.flush()
        os._exit(_FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
