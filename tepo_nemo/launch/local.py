"""The ranks of one machine: one process each, that live and end together."""

import ctypes
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tepo_nemo.errors import UserError
from tepo_nemo.launch.outcome import ERROR_PREFIX, ExitCode, print_error

CONSOLE_VARIABLE = "TEPO_NEMO_CONSOLE_FD"
"""Tells rank 0 the file descriptor of the terminal, since its own output goes to its log."""

_GRACE_S = 10.0  # between the request to end and the kill, after another rank has failed
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
_ERROR_LINE = re.compile(r"^(\[rank\d+\]:)?\s*[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")


def run_ranks(
    command: Sequence[str],
    *,
    ranks: int,
    logs: Path,
    environment: Mapping[str, str] | None = None,
    grace_s: float = _GRACE_S,
) -> int:
    """Run `command` as ranks 0 to `ranks` - 1 and wait for all of them; returns the exit code of the whole.

    Each rank writes to `logs`/rank_K.log. The first rank that fails ends the others. SIGTERM and SIGINT reach
    the ranks as SIGTERM, and a second one kills them; SIGUSR1 reaches them as it is. If this process dies,
    the kernel kills the ranks (on Linux).

    Args:
        environment: variables for the ranks, where they are not set already.
        grace_s: seconds that the other ranks have to end after one has failed.

    Raises:
        UserError: a rank ended with exit code 2; carries the line that the rank has written.
    """
    group = _RankGroup()
    with handling_signals(group.stop, warn=group.warn):
        common = {**(environment or {}), **os.environ, **_rendezvous(ranks)}
        for rank in range(ranks):
            group.start(
                command, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, logs / f"rank_{rank}.log"
            )
        failed = group.wait(grace_s)
    if failed is None:
        return ExitCode.STOPPED if ExitCode.STOPPED in group.codes.values() else ExitCode.DONE
    log = logs / f"rank_{failed}.log"
    if group.codes[failed] == ExitCode.MISTAKE:
        raise UserError(_last_line(log).removeprefix(ERROR_PREFIX))
    print_error(f"rank {failed} {describe_failure(log, group.codes[failed])} (see {log})")
    return ExitCode.FAILED


class _RankGroup:
    """Rank processes. Each leads a process group, so that a kill takes along what it has started."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stopping = False

    def start(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        console = [os.dup(1)] if not self._processes else []
        if console:
            environment[CONSOLE_VARIABLE] = str(console[0])
        self._processes.append(start_process(command, log, environment=environment, descriptors=console))
        for descriptor in console:
            os.close(descriptor)
        if self._stopping:
            self._processes[-1].terminate()

    def wait(self, grace_s: float) -> int | None:
        """Wait until all have ended; the first rank that failed, or None."""
        for rank in range(len(self._processes)):
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()
        failed, deadline = None, float("inf")
        while len(self.codes) < len(self._processes):
            try:
                # The timeout also lets signal handlers run.
                rank = self._ended.get(timeout=0.2)
                self.codes[rank] = self._processes[rank].returncode
            except queue.Empty:
                rank = None
            if (
                rank is not None
                and failed is None
                and self.codes[rank] not in (ExitCode.DONE, ExitCode.STOPPED)
            ):
                failed, deadline = rank, time.monotonic() + grace_s
                self._terminate()
            if time.monotonic() > deadline:
                self._kill()
                deadline = float("inf")
        self._kill()  # what the ranks may have left running
        return failed

    def stop(self) -> None:
        """A signal has come: ask all ranks to end; kill them when it comes again."""
        if self._stopping:
            self._kill()
        self._stopping = True
        self._terminate()

    def warn(self) -> None:
        """SIGUSR1 has come: a scheduler announces the end."""
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)

    def _watch(self, rank: int) -> None:
        self._processes[rank].wait()
        self._ended.put(rank)

    def _terminate(self) -> None:
        for process in self._processes:
            process.terminate()

    def _kill(self) -> None:
        for process in self._processes:
            kill_group(process)


def start_process(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start `command` in a process group of its own; it adds to `log` and is killed when this process ends.

    Args:
        environment: all of its variables; None for those of this process.
        descriptors: open files that it keeps.
    """
    with open(log, "ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
            pass_fds=descriptors,
            preexec_fn=_die_with_parent(os.getpid()),
        )


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process of `start_process` and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of them are gone


@contextmanager
def handling_signals(stop: Callable[[], None], warn: Callable[[], None] | None = None) -> Iterator[None]:
    """Call `stop` at SIGTERM and SIGINT while the block runs, and `warn` (else `stop`) at SIGUSR1."""
    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGUSR1: warn or stop}
    previous = {
        number: signal.signal(number, lambda *_, call=handler: call()) for number, handler in handlers.items()
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _rendezvous(ranks: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONUNBUFFERED": "1",  # the log of a rank that is killed is whole
    }


def free_port() -> int:
    """A loopback port that nobody listens on at the moment.

    Between this and its use seconds pass. So it is none that the system gives to outgoing connections (from
    32768 on), nor one that SLURM jobs take from their number (see `scheduler`).
    """
    while True:
        port = random.SystemRandom().randrange(30000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Runs in the child before its program: the kernel shall kill it when its parent ends, in any way."""
    if _LIBC is None:
        return None

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before the request
            os._exit(ExitCode.FAILED)

    return prepare


def describe_failure(log: Path, code: int) -> str:
    """How a process ended, by its exit code, and the line of its log that says why."""
    return f"{_how(code)}: {_last_line(log).removeprefix(ERROR_PREFIX)}"


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"


def _last_line(log: Path) -> str:
    """The last line that names an error, or else the last one at all."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(ERROR_PREFIX) or _ERROR_LINE.match(line)]
    return (errors or lines or ["it has written nothing"])[-1]
