"""Commands of this machine, some of them side by side, which end together when a signal comes."""

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from tepo_nemo.launch.local import handling_signals, kill_group, start_process

_GRACE_S = 15.0  # between the request to end and the kill: a run has ranks of its own to end first
_POLL_S = 0.2


class Job(Protocol):
    """A command, and the file that takes its output."""

    @property
    def command(self) -> Sequence[str]: ...

    @property
    def log(self) -> Path: ...


AnyJob = TypeVar("AnyJob", bound=Job)


def run_jobs(
    jobs: Iterable[AnyJob],
    *,
    at_once: int,
    ended: Callable[[AnyJob, int], None],
    watch: Callable[[], None],
    grace_s: float = _GRACE_S,
) -> bool:
    """Run all jobs, `at_once` side by side; a job is taken from the iterable when there is room for it.

    SIGTERM and SIGINT reach the running jobs as SIGTERM, and no further one starts; a second signal kills
    them. A job that fails ends no other. If this process dies, the kernel kills the jobs (on Linux).

    Args:
        ended: told of each job that has ended by itself, and its exit code.
        watch: called all the time, several times a second.
        grace_s: seconds that running jobs have to end after a signal.

    Returns: whether all jobs have run; False where a signal has ended them.
    """
    pool = _Pool()
    waiting = iter(jobs)
    try:
        with handling_signals(pool.stop):
            exhausted = False
            while pool.running or not (exhausted or pool.stopping):
                while not exhausted and not pool.stopping and len(pool.running) < at_once:
                    if (job := next(waiting, None)) is None:
                        exhausted = True
                    else:
                        pool.start(job)
                for job, code in pool.take_ended():
                    if not pool.stopping:
                        ended(job, code)
                watch()
                pool.kill_late(grace_s)
                time.sleep(_POLL_S)
    finally:
        pool.kill()
    return not pool.stopping


class _Pool:
    """The jobs that run."""

    def __init__(self) -> None:
        self.running: dict[subprocess.Popen[bytes], Job] = {}
        self._stopped_at: float | None = None

    @property
    def stopping(self) -> bool:
        """Whether a signal has come."""
        return self._stopped_at is not None

    def start(self, job: Job) -> None:
        process = start_process(job.command, job.log)
        self.running[process] = job
        if self.stopping:  # the signal came meanwhile
            process.terminate()

    def take_ended(self) -> list[tuple[Job, int]]:
        codes = {process: process.poll() for process in self.running}
        return [(self.running.pop(process), code) for process, code in codes.items() if code is not None]

    def stop(self) -> None:
        """A signal has come: ask all jobs to end; kill them when it comes again."""
        if self.stopping:
            self.kill()
            return
        self._stopped_at = time.monotonic()
        for process in self.running:
            process.terminate()

    def kill_late(self, grace_s: float) -> None:
        """Kill those that have not ended `grace_s` seconds after the signal."""
        if self._stopped_at is not None and time.monotonic() > self._stopped_at + grace_s:
            self.kill()

    def kill(self) -> None:
        for process in self.running:
            kill_group(process)
