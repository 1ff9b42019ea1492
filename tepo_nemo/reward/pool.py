"""Grading in processes that can be killed: a response may hang them, eat their memory, or crash them.

Workers are forked by a server process that is a fresh interpreter (Python's "forkserver"), so that they have
nothing of the training process (PyTorch, NCCL, MPI, its threads) and a killed one is replaced within
milliseconds: the server has imported the grader already. There are more workers than cores, since those that
hang must not stop the others. Each has a pebble pool of its own: the workers of one pool share locks, and one
that is killed while it holds them stops all.
"""

import contextlib
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from queue import Empty, SimpleQueue
from threading import Thread
from types import ModuleType

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from tepo_nemo.errors import UserError
from tepo_nemo.reward.grading import RewardSpec, check_result, load_reward
from tepo_nemo.reward.result import RewardFunction, RewardResult

Item = tuple[str, str, str, dict]  # prompt, response text, gold, metadata

_TRIES = 6  # at a response whose worker ended; it may have been killed for another reason
_STALL_S = 10.0  # until a worker takes a response, and beyond the time limit until its pool is given up
_BROKEN = (ProcessExpired, BrokenProcessPool, CancelledError, RuntimeError, OSError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PoolSettings:
    """How responses are graded; the defaults are those of the configuration's `data.grading`."""

    workers: int  # processes; about as many responses may hang at once without slowing down the others
    time_limit_s: float  # of one response; then its worker is killed, and its status is `timeout`
    memory_limit_gib: float  # address space of a worker; beyond it the status is `error`
    max_tasks: int  # responses until a worker is replaced by a fresh one
    response_tail: int  # characters from the end of a response that are graded
    alarm_fraction: float  # share of failures in a batch above which an error is logged


class RewardPool:
    """Grades batches of responses with a reward that may hang; used by one thread at a time.

    Nothing runs before the first batch.
    """

    def __init__(self, reward: RewardSpec, settings: PoolSettings) -> None:
        self._reward = reward
        self._settings = settings
        self._workers: list[_Worker] = []

    def grade(self, items: Sequence[Item]) -> list[RewardResult]:
        """The results in the order of the items; always one each.

        A response beyond the time limit has the status `timeout`. One on which the reward raises or runs out
        of memory, or whose worker ends again and again, has the status `error`. A worker that was killed
        costs time and no verdict.

        Raises:
            UserError: raised by the reward (the data is wrong), or it returns no RewardResult.
        """
        if items and not self._workers:
            self._start()
        results: list[RewardResult] = [RewardResult(0.0, "error")] * len(items)
        failures: list[str] = []
        tries = Counter[int]()
        todo = deque(range(len(items)))
        idle = deque(self._workers)
        busy: dict[ProcessFuture, tuple[_Worker, int]] = {}
        done: SimpleQueue[ProcessFuture] = SimpleQueue()
        while todo or busy:
            while todo and idle:
                worker, row = idle.popleft(), todo.popleft()
                tries[row] += 1
                future = worker.start(self._arguments(items[row]))
                busy[future] = worker, row
                future.add_done_callback(done.put)
            future = self._next_finished(done, busy)
            worker, row = busy.pop(future)
            idle.append(worker)
            try:
                results[row], failure = future.result(timeout=0)
                failures += [failure] if failure else []
            except UserError:
                self.close()
                raise
            except TimeoutError:
                results[row] = RewardResult(0.0, "timeout")
            except _BROKEN:
                worker.abandon()
                if tries[row] < _TRIES:
                    todo.append(row)
        self._report(results, failures)
        return results

    def close(self) -> None:
        """Kill the workers; a later batch starts new ones."""
        for worker in self._workers:
            worker.abandon()
        for worker in self._workers:
            worker.join()
        self._workers = []

    def _start(self) -> None:
        context = _Context()
        context.set_forkserver_preload(["tepo_nemo.reward.warm"])
        process = context.Process(target=os.getpid)  # returns when the server has imported the grader
        process.start()
        process.join()
        settings = self._settings
        self._workers = [_Worker(context, self._reward, settings) for _ in range(settings.workers)]

    def _arguments(self, item: Item) -> Item:
        prompt, response_text, gold, metadata = item
        return prompt, response_text[-self._settings.response_tail :], gold, metadata

    def _next_finished(
        self, done: "SimpleQueue[ProcessFuture]", busy: "dict[ProcessFuture, tuple[_Worker, int]]"
    ) -> ProcessFuture:
        """A future that has a result, or that was cancelled since its worker was lost."""
        while True:
            try:
                return done.get(timeout=1.0)
            except Empty:
                for future, (worker, _) in list(busy.items()):
                    if worker.lost(future):
                        future.cancel()
                        worker.abandon()

    def _report(self, results: Sequence[RewardResult], failures: Sequence[str]) -> None:
        if failures:
            _log.error(
                "the reward failed on %d of %d responses; one:\n%s", len(failures), len(results), failures[0]
            )
        failed = sum(result.failed for result in results)
        if failed > self._settings.alarm_fraction * len(results):
            _log.error(
                "grading failed on %d of %d responses (%d of them by time), more than "
                "data.grading.alarm_fraction=%s allows; they are not trained on",
                failed, len(results), sum(result.status == "timeout" for result in results),
                self._settings.alarm_fraction,
            )  # fmt: skip


def open_reward(reward: RewardSpec, settings: PoolSettings) -> "RewardFunction | RewardPool":
    """The reward as a function where it cannot hang (see `in_process`), else as a pool, not started yet.

    Raises:
        UserError: the reward is unknown or cannot be imported, or does not take its options.
    """
    function = load_reward(reward)
    return function if getattr(function, "in_process", False) else RewardPool(reward, settings)


class _Worker:
    """One process behind a pool of its own, which is made anew when it broke."""

    def __init__(self, context: ForkServerContext, reward: RewardSpec, settings: PoolSettings) -> None:
        self._context = context
        self._reward = reward
        self._settings = settings
        self._pool: ProcessPool | None = None
        self._last = Thread()
        self._since = 0.0

    def start(self, item: Item) -> ProcessFuture:
        """Begin to grade a response."""
        self._since = time.monotonic()
        for _ in range(_TRIES):
            if self._pool is None:
                self._pool = ProcessPool(
                    max_workers=1,
                    max_tasks=self._settings.max_tasks,
                    initializer=_start_worker,
                    initargs=[self._reward, self._settings.memory_limit_gib],
                    context=self._context,
                )
            try:
                return self._pool.schedule(_grade_in_worker, item, timeout=self._settings.time_limit_s)
            except _BROKEN:  # its process was killed while it was idle
                self.abandon()
        raise RuntimeError("no process can be started to grade responses")

    def lost(self, future: ProcessFuture) -> bool:
        """Whether its pool forgot this response, or never handed it over."""
        limit = _STALL_S + (self._settings.time_limit_s if future.running() else 0.0)
        return time.monotonic() - self._since > limit

    def abandon(self) -> None:
        """End the process and the pool, in the background: a broken one may take its time."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            self._last = Thread(target=pool.join, daemon=True)
            self._last.start()

    def join(self) -> None:
        """Wait a moment for the end of what was abandoned."""
        if self._last.ident is not None:
            self._last.join(_STALL_S)


# In the workers.

_reward: RewardFunction | None = None


def _start_worker(reward: RewardSpec, memory_limit_gib: float) -> None:
    global _reward
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler would wait for the end of a C function
    limit = int(memory_limit_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _reward = load_reward(reward)


def _grade_in_worker(
    prompt: str, response_text: str, gold: str, metadata: dict
) -> tuple[RewardResult, str | None]:
    """The result, and the traceback of an exception that the reward raised."""
    assert _reward is not None
    try:
        return check_result(_reward(prompt, response_text, gold, metadata)), None
    except UserError:
        raise
    except Exception:
        return RewardResult(0.0, "error"), traceback.format_exc(limit=-8)


class _Process(ForkServerProcess):
    @staticmethod
    def _Popen(process: ForkServerProcess) -> object:
        with _nameless_program():
            return ForkServerProcess._Popen(process)


class _Context(ForkServerContext):
    Process = _Process


@contextlib.contextmanager
def _nameless_program() -> Iterator[None]:
    """Python lets a new process import the program again, which may be a script with all of PyTorch."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program
