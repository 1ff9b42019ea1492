"""Worlds of real gloo ranks for tests.

    def mean_of_ranks(rank, world_size, scale):
        value = torch.tensor(float(rank))
        torch.distributed.all_reduce(value)
        return value.item() * scale / world_size

    def test_mean(worlds):
        assert worlds(2).run(mean_of_ranks, 10.0) == [5.0, 5.0]

A stack is imported once a session, in a launcher process of its own, and ranks are forks of it:

* `worlds(n)` (stack "torch"): torch.distributed is initialised; the ranks are kept and reused by later
  calls, and replaced after a failure.
* `worlds(n, stack="nemo")`: the CPU stand-ins and the NeMo stack are imported; every call gets fresh ranks,
  since the model-parallel state is one a process. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
  are set, initialising process groups is left to the function.

The function and what it takes and returns are pickled. The function is one at the top of a test module; a
rank loads that module from its file under the name it has in the test process, so pytest's importmode
does not matter. Changes that a test makes to its own process (monkeypatch, os.environ) do not reach the
ranks. Ranks have one thread each and see no GPU. What they print goes to pytest's capture.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, Literal

from tepo_nemo.launch.local import free_port

Stack = Literal["torch", "nemo"]

# A rank that waits for one which has failed learns nothing more: it gets this many seconds to end by itself.
GRACE_SECONDS = 1.0
TRACEBACK_SECONDS = 0.3


class Worlds:
    """All worlds of a test session: `worlds(n, stack)` returns the one of that size and stack."""

    def __init__(self) -> None:
        self._launchers: dict[str, _Launcher] = {}
        self._worlds: dict[tuple[int, str], World] = {}

    def __call__(self, size: int, stack: Stack = "torch") -> "World":
        if stack not in self._launchers:
            self._launchers[stack] = _Launcher(stack)
        if (size, stack) not in self._worlds:
            self._worlds[size, stack] = World(self._launchers[stack], size, keep=stack == "torch")
        return self._worlds[size, stack]

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        for launcher in self._launchers.values():
            launcher.close()


class World:
    """`size` ranks that run functions together."""

    def __init__(self, launcher: "_Launcher", size: int, keep: bool) -> None:
        self.size = size
        self._launcher = launcher
        self._keep = keep
        self._ranks: _Ranks | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> list[Any]:
        """Execute `function(rank, world_size, *arguments)` in every rank; the results in rank order.

        The first exception of any rank is raised here, with the rank and its traceback in a note. Ranks that
        are not done after `timeout` seconds are killed and named in a TimeoutError.
        """
        __tracebackhide__ = True
        if "." in function.__qualname__:
            raise TypeError(
                f"{function.__qualname__} is not at the top of its module, where ranks look it up"
            )
        path = sys.modules[function.__module__].__file__
        request = pickle.dumps((function.__module__, path, function.__name__, pickle.dumps(arguments)))
        if self._ranks is None or not self._ranks.alive():
            self.close()
            self._ranks = _Ranks(self._launcher, self.size, store=self._keep)
        try:
            results = self._ranks.call(request, timeout)
        except (
            BaseException
        ):  # also an interrupt: ranks in the middle of a call are of no use to the next one
            self._ranks.kill()
            self._ranks = None
            raise
        if not self._keep:
            self.close()
        return results

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


class _Launcher:
    """A `rank_launcher` process and the address where its ranks report."""

    def __init__(self, stack: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="worlds-"))
        self.listener = Listener(str(self.folder / "ranks"), "AF_UNIX", backlog=64)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        script = Path(__file__).with_name("rank_launcher.py")
        command = [sys.executable, str(script), stack, self.listener.address]
        # A session of its own: Ctrl-C interrupts pytest alone, which then closes its worlds.
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.control = self.listener.accept()
        state, trace = self.control.recv()
        if state == "failed":
            self.close()
            raise RuntimeError(f"the stack {stack!r} cannot be imported:\n{trace}")

    def request(self, name: str, payload: list[Any]) -> list[int]:
        self.control.send((name, payload))
        return self.control.recv()

    def close(self) -> None:
        self.control.close()
        self.process.wait()
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Ranks:
    """Forked rank processes and the connections to them, in rank order."""

    def __init__(self, launcher: _Launcher, size: int, store: bool) -> None:
        self.launcher = launcher
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        if store:
            shared["STORE"] = str(launcher.folder / uuid.uuid4().hex)
        self.pids = launcher.request(
            "fork", [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        )
        connections: dict[int, Connection] = {}
        while len(connections) < size:
            connection = launcher.listener.accept()
            connections[pickle.loads(connection.recv_bytes())] = connection
        self.connections = [connections[rank] for rank in range(size)]

    def alive(self) -> bool:
        """An idle rank sends nothing: something to read is the end of its connection."""
        return not wait(self.connections, timeout=0)

    def call(self, request: bytes, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        for connection in self.connections:
            connection.send_bytes(request)
        deadline = time.monotonic() + timeout
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        results: dict[int, Any] = {}
        errors: list[BaseException] = []
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                kind, value = self._receive(rank)
                if kind == "result":
                    results[rank] = value
                else:
                    errors.append(value)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if errors:
            raise errors[0]
        if waiting:
            raise self._hang(sorted(waiting.values()), timeout)
        return [results[rank] for rank in range(len(results))]

    def _receive(self, rank: int) -> tuple[Literal["result", "error"], Any]:
        try:
            kind, value = pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return "error", RuntimeError(f"rank {rank} died")
        if kind == "error":
            value = _restore(rank, *value)
        return kind, value

    def _hang(self, ranks: list[int], timeout: float) -> TimeoutError:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGUSR1)  # faulthandler prints where it hangs
        time.sleep(TRACEBACK_SECONDS)
        names = ", ".join(map(str, ranks))
        return TimeoutError(
            f"not done after {timeout} s: rank(s) {names}; their tracebacks are in the captured stderr"
        )

    def kill(self) -> None:
        for pid in self.pids:  # not reaped yet, so the pid is still this rank's
            os.killpg(pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """A rank ends when its connection does."""
        for connection in self.connections:
            connection.close()
        self.launcher.request("reap", self.pids)


def _restore(rank: int, module: str, pickled: bytes | None, trace: str) -> BaseException:
    """The rank's exception, or a stand-in where only an import of the rank's stack would give its class."""
    if pickled is not None and module in sys.modules:
        error = pickle.loads(pickled)
    else:
        error = RuntimeError(f"rank {rank}: {trace.strip().splitlines()[-1]}")
    error.add_note(f"raised in rank {rank}:\n{trace}")
    return error
