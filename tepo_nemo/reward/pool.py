"""Grading in processes that can be killed: a response may hang them, eat their memory, or crash them.

Workers are forked by a server process that is a fresh interpreter (Python's "forkserver"), so that they have
nothing of the training process (PyTorch, NCCL, MPI, its threads) and a killed one is replaced within
milliseconds: the server has imported the grader already. There are more workers than cores, since those that
hang must not stop the others.
"""

import contextlib
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType

from pebble import ProcessExpired, ProcessPool

from tepo_nemo.errors import UserError
from tepo_nemo.reward.grading import RewardSpec, check_result, load_reward
from tepo_nemo.reward.result import RewardFunction, RewardResult

Item = tuple[str, str, str, dict]  # prompt, response text, gold, metadata

_ATTEMPTS = (
    3  # at a response whose worker ended while it was graded; it may have been killed for another reason
)
_START_LIMIT_S = 300.0  # until the first worker runs; a busy file system is slow
_STALL_S = 5.0  # beyond the time limit without a single verdict: the pool is broken
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
        self._pool: ProcessPool | None = None

    def grade(self, items: Sequence[Item]) -> list[RewardResult]:
        """The results in the order of the items; always one each.

        A response beyond the time limit has the status `timeout`. One on which the reward raises or runs out
        of memory, or whose worker ends again and again, has the status `error`. A worker that was killed and
        a pool that broke cost time and no verdict.

        Raises:
            UserError: raised by the reward (the data is wrong), or it returns no RewardResult.
        """
        results: list[RewardResult | None] = [None] * len(items)
        failures: list[str] = []
        for _ in range(_ATTEMPTS):
            missing = [row for row, result in enumerate(results) if result is None]
            if missing:
                self._attempt(items, missing, results, failures)
        graded = [RewardResult(0.0, "error") if result is None else result for result in results]
        self._report(graded, failures)
        return graded

    def close(self) -> None:
        """Kill the workers; a later batch starts new ones."""
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        pool.stop()
        pool.join()

    def _attempt(
        self,
        items: Sequence[Item],
        rows: Sequence[int],
        results: list[RewardResult | None],
        failures: list[str],
    ) -> None:
        """Grade the rows; those whose worker or pool ended early stay None."""
        try:
            pool = self._running_pool()
            rows_of = {self._schedule(pool, items[row]): row for row in rows}
        except _BROKEN:
            return self._abandon()
        waiting = set(rows_of)
        while waiting:
            done, waiting = wait(waiting, self._settings.time_limit_s + _STALL_S, FIRST_COMPLETED)
            if not done:
                return self._abandon()
            for future in done:
                row = rows_of[future]
                try:
                    results[row], failure = future.result()
                except TimeoutError:
                    results[row], failure = RewardResult(0.0, "timeout"), None
                except UserError:
                    self._abandon()
                    raise
                except _BROKEN:
                    continue
                if failure is not None:
                    failures.append(failure)
        return None

    def _schedule(self, pool: ProcessPool, item: Item) -> object:
        prompt, response_text, gold, metadata = item
        tail = response_text[-self._settings.response_tail :]
        return pool.schedule(
            _grade_in_worker, args=[prompt, tail, gold, metadata], timeout=self._settings.time_limit_s
        )

    def _running_pool(self) -> ProcessPool:
        if self._pool is None or not self._pool.active:
            if self._pool is not None:
                self._abandon()
            settings = self._settings
            context = _Context()
            context.set_forkserver_preload(["tepo_nemo.reward.warm"])
            self._pool = ProcessPool(
                max_workers=settings.workers,
                max_tasks=settings.max_tasks,
                initializer=_start_worker,
                initargs=[self._reward, settings.memory_limit_gib],
                context=context,
            )
            self._pool.schedule(os.getpid).result(_START_LIMIT_S)
        return self._pool

    def _abandon(self) -> None:
        """Kill a pool that is broken, without waiting for its threads, which may be so for ever."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            for process in list(pool._pool_manager.worker_manager.workers.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

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


class _Worker(ForkServerProcess):
    @staticmethod
    def _Popen(process: ForkServerProcess) -> object:
        with _nameless_program():
            return ForkServerProcess._Popen(process)


class _Context(ForkServerContext):
    Process = _Worker


@contextlib.contextmanager
def _nameless_program() -> Iterator[None]:
    """Python lets a new process import the program again, which may be a script with all of PyTorch."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program
