"""Seconds spent in the phases of a step."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class PhaseTimers:
    """Adds up wall-clock seconds by phase until `take`.

    `synchronize` is called at both ends of a phase, so that queued device work is counted where it belongs.
    """

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = defaultdict(float)
        self._step_start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside as phase `name`."""
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[name] += time.perf_counter() - start

    def give(self, seconds: Mapping[str, float]) -> None:
        """Count what `take` gave in an earlier process as part of this step."""
        for name, value in seconds.items():
            self._seconds[name.removeprefix("time/").removesuffix("_s")] += value

    def take(self) -> dict[str, float]:
        """``time/PHASE_s`` of every phase and ``time/step_s`` since the last call; starts again from 0."""
        now = time.perf_counter()
        seconds = {f"time/{name}_s": value for name, value in self._seconds.items()}
        seconds["time/step_s"] = seconds.get("time/step_s", 0.0) + now - self._step_start
        self._seconds.clear()
        self._step_start = now
        return seconds
