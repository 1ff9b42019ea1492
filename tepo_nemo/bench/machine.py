"""What the figures were measured on and with."""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

from tepo_nemo.bench import peers

_PACKAGES = ("torch", "numpy", "megatron-core", "nemo_toolkit", "nemo-aligner")


def describe_machine() -> dict[str, str | int | bool]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_a_rank": 1,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "compiler": os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "none",
        "torch_compile": os.environ.get("TORCHDYNAMO_DISABLE", "0") != "1",
    }


def versions() -> dict[str, str]:
    """Of torch, the host and the peers; "not installed" where they are not."""
    found = {name: _version(name) for name in _PACKAGES}
    return found | {name: peers.version_of(name) or "not installed" for name in peers.TESTED}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
