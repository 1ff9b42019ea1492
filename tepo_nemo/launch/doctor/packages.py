"""The installed packages, without importing any of them."""

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, TypeAlias

from packaging.utils import canonicalize_name

Stack: TypeAlias = Literal["login", "cpu", "container"]
"""login: the light layers alone; cpu: requirements/cpu.txt; container: a machine with GPUs."""


@dataclass(frozen=True)
class Packages:
    """What is installed in this Python."""

    python: tuple[int, int]  # major, minor
    versions: Mapping[str, str]  # by canonical name: lower case, with "-"
    torch_cuda: (
        str | None
    )  # the CUDA version that torch was built for; None for a CPU build, or without torch
    apex: Literal["absent", "nvidia", "other"]

    def stack(self, gpus: bool) -> Stack:
        """Which set of versions this Python should have, given whether the machine has GPUs."""
        if "torch" not in self.versions:
            return "login"
        with_gpus = gpus or self.apex == "nvidia" or "transformer-engine" in self.versions
        return "container" if with_gpus else "cpu"


def gather_packages() -> Packages:
    """The packages of the Python that runs."""
    versions = {
        canonicalize_name(found.metadata["Name"]): found.version
        # In reverse, since the first of two installations on the path is the one that is imported.
        for found in reversed(list(distributions()))
        if found.metadata["Name"]  # a broken installation has none
    }
    return Packages(sys.version_info[:2], versions, _torch_cuda(), _apex())


def _torch_cuda() -> str | None:
    folder = _folder("torch")
    if folder is None:
        return None
    written = re.search(r"^cuda\b.*= *'([\d.]+)'", (folder / "version.py").read_text(encoding="utf-8"), re.M)
    return written[1] if written else None


def _apex() -> Literal["absent", "nvidia", "other"]:
    folder = _folder("apex")
    if folder is None:
        return "absent"
    return "nvidia" if (folder / "optimizers" / "fused_adam.py").is_file() else "other"


def _folder(package: str) -> Path | None:
    found = importlib.util.find_spec(package)
    return Path(found.origin).parent if found is not None and found.origin else None
