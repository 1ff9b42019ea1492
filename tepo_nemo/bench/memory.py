"""Peak memory: of the tensors that operators make, and of a whole process that does nothing else."""

import ctypes
import os
import pickle
import signal
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tepo_nemo.bench.counting import tensors_of

_M_MMAP_THRESHOLD = -3  # of glibc's mallopt
_MMAP_FROM_BYTES = 65536


class LiveStorage(TorchDispatchMode):
    """Bytes of the storages that have been made since it became active and are alive; exact for eager code.

    What an operator allocates and frees inside itself is not seen, nor is what a tensor held before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in tensors_of((args, kwargs)):  # also those from before
            self._know(tensor.untyped_storage(), size=0)
        result = function(*args, **kwargs)
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            self._know(storage, storage.nbytes())
        return result

    def _know(self, storage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def in_child(function: Callable[[], Any]) -> Any:
    """Run `function` in a fork of this process and return its result; a fork has a memory peak of its own.

    PyTorch must have one thread, since a fork has no other (a parallel operator would wait for the ones it
    remembers), and this process no process group. Raises RuntimeError with the child's error.
    """
    threads = torch.get_num_threads()
    assert threads == 1, f"a process whose operators have {threads} threads forks"
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(function(), pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read()
    except BaseException:  # an interrupt: the child would hold on to what it inherited
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        raise RuntimeError(f"a memory measurement ended with exit code {code}")
    return pickle.loads(answer)


def prepare_high_water() -> None:
    """Have the allocator give larger blocks back when they are freed, so that the peak is that of one run."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM_BYTES)


def high_water_bytes(function: Callable[[], None]) -> int:
    """By how much the resident memory of this process rises above its present value while `function` runs."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present value
    before = _status_bytes("VmRSS")
    function()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
