"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Fails where it is not so within `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """A zombie is dead: who reaps it in a container is not ours."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
