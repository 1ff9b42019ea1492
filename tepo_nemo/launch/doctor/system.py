"""What the machine gives a run: a place to write, shared memory, open files, a locale."""

import locale
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.launch.doctor.finding import Finding, finding

_GIB = 2**30
# A checkpoint holds 14 bytes a parameter (bf16 weights; fp32 weights and two moments): 99 GiB for 7.6 billion
# ones, and two are kept while the next is written. The toy's runs take megabytes.
_FREE_GIB = {True: 300, False: 1}
_SHARED_GIB = {True: 8, False: 0.25}  # Docker gives 0.0625
_OPEN_FILES = 4096  # sockets of all ranks, shards, workers


@dataclass(frozen=True)
class System:
    """Sizes in bytes."""

    output: Path
    refusal: str | None  # why nothing can be written there
    free: int  # where it is, or would be made
    shared: int | None  # size of /dev/shm; None without one
    open_files: int  # soft limit of this process
    locked_memory: int | None  # soft limit; None without one
    encodings: tuple[str, ...]  # of file names, of files opened without one, of stdout


def gather_system(output: Path) -> System:
    """Look at the machine; writes an empty file where `output` is, or would be made, and removes it."""
    place = next(path for path in (output, *output.absolute().parents) if path.exists())
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shared = Path("/dev/shm")
    return System(
        output=output,
        refusal=_refusal(place),
        free=shutil.disk_usage(place).free,
        shared=shutil.disk_usage(shared).total if shared.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        encodings=(sys.getfilesystemencoding(), locale.getpreferredencoding(False), sys.stdout.encoding),
    )


def _refusal(place: Path) -> str | None:
    if not place.is_dir():
        return f"{place} is a file"
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{place}: {os.strerror(error.errno)}"


def check_system(system: System, gpus: bool, infiniband: bool) -> Iterator[Finding]:
    """What the machine gives; more is asked for where models are trained on GPUs."""
    yield finding(
        "run directory",
        system.refusal or f"{system.output} can be written",
        problem="give a folder of your own: --output DIR" if system.refusal else "",
    )
    yield finding(
        "free space",
        _gib(system.free),
        warning=f"checkpoints may take {_FREE_GIB[gpus]} GiB: choose another place, or make room"
        if system.free < _FREE_GIB[gpus] * _GIB
        else "",
    )
    yield _check_shared_memory(system.shared, gpus)
    yield finding(
        "open files",
        str(system.open_files),
        warning=f"ulimit -n {_OPEN_FILES}" if system.open_files < _OPEN_FILES else "",
    )
    if infiniband and system.locked_memory is not None:
        yield Finding(
            "locked memory", "warning", _gib(system.locked_memory), "InfiniBand needs it: ulimit -l unlimited"
        )
    yield _check_encodings(system.encodings)


def _check_shared_memory(shared: int | None, gpus: bool) -> Finding:
    wanted = _SHARED_GIB[gpus]
    advice = f"make it {wanted:g} GiB or more: docker run --ipc=host, or --shm-size={wanted:g}g"
    too_small = shared is None or shared < wanted * _GIB
    return Finding(
        "shared memory",
        "ok" if not too_small else "problem" if gpus else "warning",
        "no /dev/shm" if shared is None else f"/dev/shm of {_gib(shared)}",
        advice if too_small else "",
    )


def _check_encodings(encodings: tuple[str, ...]) -> Finding:
    other = sorted({name for name in encodings if name.lower().replace("-", "") != "utf8"})
    return finding("encoding", ", ".join(other) or "UTF-8", problem="export LC_ALL=C.UTF-8" if other else "")


def _gib(size: int) -> str:
    return f"{size / _GIB:.3g} GiB"
