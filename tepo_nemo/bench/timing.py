"""Times of implementations that take turns, and what their ratio is worth."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist


class Times(NamedTuple):
    """Seconds of one run, of the slowest rank."""

    forward: float
    total: float


class Run(Protocol):
    """One run on inputs of its own, which are made when it is."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...


def time_run(make: Callable[[], Run]) -> Times:
    """Time one run; all ranks start together, making the inputs is not timed. Equal on all ranks."""
    run = make()
    dist.barrier()
    start = time.perf_counter()
    run.forward()
    middle = time.perf_counter()
    run.backward()
    end = time.perf_counter()
    slowest = torch.tensor([middle - start, end - start], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return Times(*slowest.tolist())


def time_pairs(
    first: Callable[[], Times], second: Callable[[], Times], pairs: int
) -> list[tuple[Times, Times]]:
    """Times of two things that take turns as ABBA, so that neither gains from the order or a drift."""
    timed = []
    for index in range(pairs):
        if index % 2 == 0:
            a, b = first(), second()
        else:
            b, a = second(), first()
        timed.append((a, b))
    return timed


class Ratio(NamedTuple):
    """Median of paired ratios, with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def ratio(pairs: list[tuple[float, float]], resamples: int = 10_000, seed: int = 1) -> Ratio:
    """How many times as long the second of a pair takes as the first one."""
    ratios = np.array([second / first for first, second in pairs])
    drawn = np.random.default_rng(seed).integers(len(ratios), size=(resamples, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [2.5, 97.5])
    return Ratio(median(ratios.tolist()), float(low), float(high))
