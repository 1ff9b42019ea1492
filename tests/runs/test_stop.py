import os
import signal
import time
from collections.abc import Iterator

import pytest

from tepo_nemo.runs.stop import StopFlag


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def reason(flag: StopFlag) -> str:
    return StopFlag.REASONS[flag.value]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_is_noted_and_nothing_else(name: str) -> None:
    flag = StopFlag()
    flag.listen()
    assert flag.value == 0
    os.kill(os.getpid(), getattr(signal, name))
    assert reason(flag) == name


def test_the_announcement_is_followed_by_the_end() -> None:
    """A scheduler sends SIGUSR1 some minutes before SIGTERM."""
    flag = StopFlag()
    flag.listen()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    assert reason(flag) == "SIGTERM"


def test_a_time_limit_comes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limited, unlimited = StopFlag(), StopFlag()
    now[0] = 120.0
    limited.limit(60)  # of the whole, what has passed already included
    unlimited.limit(None)
    now[0] = 159.9
    assert limited.value == 0
    now[0] = 160.0
    assert reason(limited) == "its time limit"
    assert unlimited.value == 0
