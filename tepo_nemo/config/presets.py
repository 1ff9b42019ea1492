"""The folder of presets, and what can be chosen in it."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import tepo_nemo

ROOT = "tepo"  # the root configuration, configs/tepo.yaml
STUDIES = "study"  # the folder of what is no group of presets but files for `tepo-nemo study`


def config_folder() -> Path:
    """`configs/`, wherever it is."""
    return shipped_folder("configs")


def shipped_folder(name: str) -> Path:
    """A folder of the repository's top: package data of an installation, or beside the package."""
    package = Path(tepo_nemo.__file__).parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


@cache
def choices() -> dict[str, tuple[str, ...]]:
    """The presets of each group, sorted: {"algorithm": ("grpo", ...), "model": ...}."""
    folders = sorted(path for path in config_folder().iterdir() if path.is_dir() and path.name != STUDIES)
    return {
        folder.name: presets
        for folder in folders
        if (presets := tuple(sorted(path.stem for path in folder.glob("*.yaml"))))
    }


@cache
def method_keys(method: str) -> frozenset[str]:
    """The keys of the `algorithm` presets of a method; empty for a method without one."""
    return frozenset(key for preset in _algorithm_presets() if preset.get("name") == method for key in preset)


def _algorithm_presets() -> Iterator[dict[str, Any]]:
    for path in (config_folder() / "algorithm").glob("*.yaml"):
        yield yaml.safe_load(path.read_text(encoding="utf-8"))
