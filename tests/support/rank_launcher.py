"""The process that imports a stack once and forks ranks from itself, and the loop that a rank runs.

Started by `support.worlds` as `python rank_launcher.py STACK ADDRESS`; not imported by tests. The
launcher starts no thread and touches no device, so that a fork of it is a clean process.
"""

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from types import ModuleType
from typing import Any


def launch(stack: str, address: str) -> None:
    """Import the stack, then serve ("fork", environments) and ("reap", pids) while the test process lives."""
    control = Client(address, "AF_UNIX")
    try:
        importlib.import_module(f"support.preload_{stack}")
    except Exception:
        control.send(("failed", traceback.format_exc()))
        return
    control.send(("ready", None))
    alive: set[int] = set()
    while True:
        try:
            request, payload = control.recv()
        except EOFError:
            for pid in alive:
                os.killpg(pid, signal.SIGKILL)
            return
        if request == "fork":
            pids = [_fork_rank(control, address, environment) for environment in payload]
            alive.update(pids)
            control.send(pids)
        elif request == "reap":
            alive.difference_update(payload)
            control.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in payload])


def _fork_rank(control: Connection, address: str, environment: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    # From here on this is the rank: it must never return into the launcher's loop.
    try:
        control.close()
        os.setpgid(0, 0)  # a kill of the rank takes the processes that it starts along
        os.environ.update(environment)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        _serve(Client(address, "AF_UNIX"), int(environment["RANK"]), int(environment["WORLD_SIZE"]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve(connection: Connection, rank: int, world_size: int) -> None:
    """Execute functions until the test process closes the connection."""
    connection.send_bytes(pickle.dumps(rank))
    if "STORE" in os.environ:
        import torch.distributed as dist

        dist.init_process_group("gloo", f"file://{os.environ['STORE']}", rank=rank, world_size=world_size)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        reply = _execute(request, rank, world_size)
        sys.stdout.flush()
        connection.send_bytes(reply)


def _execute(request: bytes, rank: int, world_size: int) -> bytes:
    try:
        module, path, name, arguments = pickle.loads(request)
        function = _find(module, path, name)
        return pickle.dumps(("result", function(rank, world_size, *pickle.loads(arguments))))
    except BaseException as error:  # whatever it is, the test is told; a rank only ends when its world does
        return pickle.dumps(("error", (type(error).__module__, _pickled(error), traceback.format_exc())))


def _pickled(error: BaseException) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # an exception may hold anything; its traceback stands in for it then
        return None
    return pickled


def _find(module_name: str, path: str, name: str) -> Callable[..., Any]:
    if module_name not in sys.modules:
        _load(module_name, path)
    return getattr(sys.modules[module_name], name)


def _load(module_name: str, path: str) -> ModuleType:
    """Load a test module under the name that it has in the test process, so that pickles agree on it."""
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


if __name__ == "__main__":
    launch(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # nothing is left to clean up, and unloading a whole stack takes seconds
