"""What a conversion leaves beside its result: the hash of every file, what it was made of, and by what.

`manifest.json` lies in the folder or archive that it is about; its hashes are checked when that is converted
back. It has files in the form of a run's checkpoints, whose manifests are read, too.
"""

import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path

import safetensors
import torch

import tepo_nemo
from tepo_nemo.conversion.archive import Checkpoint
from tepo_nemo.errors import UserError
from tepo_nemo.runs.checkpoints import MANIFEST, FileRecord

_BLOCK = 1 << 22

Hashes = dict[str, FileRecord]
"""By path in the folder."""


def hash_files(
    checkpoint: Checkpoint, names: list[str], read: Callable[[int], None] = lambda count: None
) -> Hashes:
    """The hashes of some files; `read` is told of the bytes as they are read."""
    return {name: _hash(checkpoint, name, read) for name in names}


def _hash(checkpoint: Checkpoint, name: str, read: Callable[[int], None]) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with checkpoint.open(name) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
            read(len(block))
    return FileRecord(size, digest.hexdigest())


def write_manifest(
    folder: Path, *, family: str, source: str, of_source: Hashes, read: Callable[[int], None]
) -> None:
    """Write `manifest.json` for all files of a folder.

    Args:
        source: name of what it was made of.
        of_source: its hashes.
        read: told of the bytes of the folder's own files as they are hashed.
    """
    made = Checkpoint(folder)
    manifest = {
        "made_by": f"tepo-nemo {tepo_nemo.__version__}",
        "with": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
        },
        "family": family,
        "source": {"name": source, "files": of_source},
        "files": hash_files(made, made.names(), read),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_manifest(checkpoint: Checkpoint) -> Hashes:
    """The hashes that a folder or archive says it has; none where it has no manifest."""
    if MANIFEST not in checkpoint.names():
        return {}
    try:
        files = json.loads(checkpoint.read(MANIFEST))["files"]
        return {name: FileRecord(int(size), str(digest)) for name, (size, digest) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{checkpoint.path}: {MANIFEST} cannot be read ({error}); remove it to go without a check"
        ) from error


def check_hashes(checkpoint: Checkpoint, said: Hashes, found: Hashes) -> None:
    """Raises UserError where files of a manifest are missing or have changed."""
    for name, expected in said.items():
        if name not in found:
            raise UserError(f"{checkpoint.path}: {name} is missing, its {MANIFEST} names it (make it again)")
        if found[name] != expected:
            raise UserError(
                f"{checkpoint.path}: {name} has sha256 {found[name].sha256} and its {MANIFEST} says "
                f"{expected.sha256} (make it again, or remove {MANIFEST} if the change is meant)"
            )
