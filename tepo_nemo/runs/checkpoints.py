"""The checkpoints of a run: folders that are complete or absent, and which of them to go on from.

    checkpoints/
        step_000010/                what the run was after 10 steps
            model_config.yaml, model_weights/, ...   an extracted `.nemo`
            optimizer/              of all ranks, in Megatron's `torch_dist`, for any layout
            state.json              the trainer's state
            progress.json, progress.safetensors      of a step that was stopped between two updates
            ranks/rank_00000.safetensors             random generators and partial sums of each rank
            manifest.json           name, size and SHA-256 of every other file
        step_000010_update_003/     the same, stopped after 3 updates of the 11th step
        latest                      a link to the newest one
        step_000072.nemo            the weights alone, at the end

A checkpoint is written to a hidden folder, synced, and renamed: under its own name it is complete. What a
killed save has left is hidden still, and `clean` takes it away. Weights, sizes and hashes are checked before
anything of a checkpoint is used. No file is a pickle of ours: JSON, safetensors, and what Megatron-core
writes.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from tepo_nemo.runs.files import sync_folder, to_json

FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})(?:_update_(\d{3,}))?")
MANIFEST = "manifest.json"


class Position(NamedTuple):
    """Where in a run a checkpoint was taken: after `updates` updates of the step after `step`."""

    step: int
    updates: int = 0

    @property
    def name(self) -> str:
        """Of the checkpoint's folder."""
        return f"step_{self.step:06d}" + (f"_update_{self.updates:03d}" if self.updates else "")

    @classmethod
    def of(cls, name: str) -> "Position | None":
        """The position of a folder name; None where it is no checkpoint's."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(int(match[1]), int(match[2] or 0))


class FileRecord(NamedTuple):
    """A file of a checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is and holds."""

    step: int
    updates: int
    fingerprint: str
    """Of all keys of the configuration that a run cannot change on its way."""
    score: float | None
    """What `keep_best` compares; None for a checkpoint without."""
    files: dict[str, FileRecord]
    versions: dict[str, str] = field(default_factory=dict)
    """Of the packages that wrote it."""
    format: int = FORMAT

    def to_json(self) -> str:
        """One line."""
        return to_json(asdict(self) | {"files": {name: list(file) for name, file in self.files.items()}})


class Unusable(Exception):
    """A checkpoint that cannot be gone on from; the text says why."""


def read_manifest(folder: Path) -> Manifest:
    """Raises Unusable where there is none, or one that cannot be understood."""
    try:
        fields: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {name: FileRecord(int(size), str(digest)) for name, (size, digest) in fields["files"].items()}
        manifest = Manifest(**fields | {"files": files})
    except FileNotFoundError as error:
        raise Unusable(f"it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unusable(f"its {MANIFEST} is broken") from error
    if manifest.format != FORMAT:
        raise Unusable(f"its format is {manifest.format}, and this version reads {FORMAT}")
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare names and sizes with the manifest. Raises Unusable."""
    for name, recorded in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise Unusable(f"{name} is missing") from error
        if size != recorded.size:
            raise Unusable(f"{name} has {size} bytes, and {recorded.size} were written")


def check_hashes(folder: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Read the given files and compare them with the manifest. Raises Unusable."""
    for name in names:
        try:
            digest = sha256_of(folder / name)
        except OSError as error:
            raise Unusable(f"{name} cannot be read ({error.strerror})") from error
        if digest != manifest.files[name].sha256:
            raise Unusable(f"{name} is not what was written")


def sha256_of(path: Path) -> str:
    """The hexadecimal digest of a file."""
    digest = sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def share_of(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """The files that one of `ranks` ranks hashes: together all of them, about as many bytes for each."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name, record in sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0])):
        lightest = loads.index(min(loads))
        shares[lightest].append(name)
        loads[lightest] += record.size
    return shares[rank]


class CheckpointFolder:
    """The `checkpoints/` folder of a run. One process works on it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def latest(self) -> Path:
        """The link to the newest checkpoint."""
        return self.path / "latest"

    def of(self, position: Position) -> Path:
        """The folder of a checkpoint."""
        return self.path / position.name

    def positions(self) -> list[Position]:
        """Of all folders that are named as checkpoints, the newest first."""
        if not self.path.is_dir():
            return []
        found = (Position.of(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return sorted((position for position in found if position is not None), reverse=True)

    def complete(self) -> dict[Position, Manifest]:
        """The checkpoints whose files are all there, in their sizes; the newest first."""
        found = {}
        for position in self.positions():
            try:
                manifest = read_manifest(self.of(position))
                check_files(self.of(position), manifest)
            except Unusable:
                continue
            found[position] = manifest
        return found

    def partial(self, position: Position) -> Path:
        """Where a checkpoint is written. Two saves never share it: writers of a killed one may live on."""
        return self.path / f".{position.name}.{os.urandom(4).hex()}.partial"

    def commit(self, partial: Path, manifest: Manifest) -> None:
        """Give a written checkpoint its manifest and its name, and let `latest` name it.

        Every file is on the disk already. A checkpoint of that name is replaced. Raises OSError.
        """
        position = Position(manifest.step, manifest.updates)
        with open(partial / MANIFEST, "w", encoding="utf-8") as file:
            file.write(manifest.to_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
        for folder in (*(entry for entry in partial.rglob("*") if entry.is_dir()), partial):
            sync_folder(folder)
        final, replaced = self.of(position), partial.with_suffix(".replaced")
        if final.exists():
            final.rename(replaced)
        try:
            partial.rename(final)
        except OSError:
            if replaced.exists():
                replaced.rename(final)
            raise
        sync_folder(self.path)
        link = self.path / f".latest.{os.urandom(4).hex()}.partial"
        link.symlink_to(final.name)
        if self.latest.is_dir() and not self.latest.is_symlink():
            shutil.rmtree(self.latest)  # whoever has copied the run has copied what the link named
        os.replace(link, self.latest)
        sync_folder(self.path)
        shutil.rmtree(replaced, ignore_errors=True)

    def clean(self) -> None:
        """Take away what killed saves have left, and give a replaced checkpoint its name back."""
        for entry in list(self.path.glob(".*.replaced")):
            position = Position.of(entry.name.split(".")[1])
            if position is not None and not self.of(position).exists():
                entry.rename(self.of(position))
            else:
                shutil.rmtree(entry)
        for entry in self.path.glob(".*.partial"):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def retain(self, newest: Position, *, keep_last: int, keep_best: int) -> None:
        """Delete checkpoints that are neither among the last nor among the best.

        Only complete ones up to `newest` count, so that a broken one never displaces a good one, and one that
        a resumed run has gone back behind is left until it is replaced.
        """
        complete = {position: it for position, it in self.complete().items() if position <= newest}
        scores = {position: it.score for position, it in complete.items() if it.score is not None}
        best = sorted(scores, key=lambda position: (scores[position], position), reverse=True)
        keep = {*list(complete)[:keep_last], *best[:keep_best]}
        for position in complete.keys() - keep:
            self._delete(position)

    def forget_after(self, position: Position) -> None:
        """Delete later checkpoints: the run has gone back to this one on purpose, and goes another way."""
        for later in self.positions():
            if later > position:
                self._delete(later)

    def _delete(self, position: Position) -> None:
        hidden = self.path / f".{position.name}.{os.urandom(4).hex()}.partial"
        self.of(position).rename(hidden)  # a deletion that is interrupted leaves no broken checkpoint
        shutil.rmtree(hidden, ignore_errors=True)
