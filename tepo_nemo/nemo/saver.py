"""Writes checkpoints of a run (see `runs.checkpoints`), in the background if need be."""

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save

from tepo_nemo.nemo.agreement import RankError, agree, agreed, gather_objects
from tepo_nemo.nemo.build import Host
from tepo_nemo.nemo.checkpoint import WEIGHTS, pack_nemo, write_model_files
from tepo_nemo.nemo.optimizer_state import optimizer_tensors, updates_of
from tepo_nemo.nemo.random_state import random_state
from tepo_nemo.nemo.sharded import ShardedSave
from tepo_nemo.runs.checkpoints import (
    MANIFEST,
    CheckpointFolder,
    FileRecord,
    Manifest,
    Position,
    sha256_of,
)
from tepo_nemo.runs.files import sync_file, to_json
from tepo_nemo.training.progress import SavedProgress

_PACKAGES = ("tepo-nemo", "torch", "megatron-core", "nemo_toolkit", "nemo-aligner")
_HEADERS = 1 << 20  # bytes a rank writes besides its tensors, generously
OPTIMIZER, RANKS, STATE = "optimizer", "ranks", "state.json"
PROGRESS = "progress"  # .json and .safetensors
_OWN = frozenset({OPTIMIZER, RANKS, STATE, MANIFEST, f"{PROGRESS}.json", f"{PROGRESS}.safetensors"})


class SaveError(Exception):
    """A checkpoint could not be written; the text says why. Raised on all ranks."""


def rank_file(rank: int) -> str:
    """What belongs to a global rank alone."""
    return f"{RANKS}/rank_{rank:05d}.safetensors"


def own_layout() -> dict[str, int]:
    """How the ranks share the model; a rank has its like at the same layout alone."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
    }


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept."""

    keep_last: int
    keep_best: int


class _Pending(NamedTuple):
    """A checkpoint whose files are being written."""

    position: Position
    partial: Path
    parts: list[ShardedSave]
    score: float | None
    written: "Future[dict[str, FileRecord]]"


class CheckpointSaver:
    """Implements the trainer's `Saver`; all ranks call it.

    Args:
        fingerprint: of the configuration.
        about: JSON of what the run itself wants to find again, asked for at each save.
        report: says a line to a person, on the main rank.
        background: write while training goes on.
    """

    def __init__(
        self,
        host: Host,
        folder: CheckpointFolder,
        *,
        fingerprint: str,
        retention: Retention,
        background: bool,
        about: Callable[[], dict[str, Any]],
        score: Callable[[dict[str, float]], float | None],
        report: Callable[[str], None],
    ) -> None:
        self._host = host
        self._folder = folder
        self._fingerprint = fingerprint
        self._retention = retention
        self._background = background
        self._about = about
        self._score = score
        self._report = report
        self._is_main = dist.get_rank() == 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self.failed = 0
        self.newest: Position | None = None  # of the complete checkpoints

    # ----------------------------------------------------------------- the trainer's

    def save(
        self,
        state: dict[str, Any],
        progress: SavedProgress | None,
        metrics: dict[str, float],
        *,
        required: bool,
    ) -> None:
        """See `Saver`. Raises SaveError where the checkpoint is required."""
        self._settle(required=False)
        position = Position(state["step"], 0 if progress is None else progress.numbers["done"])
        score = self._score(metrics) if progress is None else None
        try:
            self._begin(position, state, progress, score)
        except RankError as failure:
            self._fail(position, failure, required)
            return
        if required or not self._background:
            self._settle(required=required)

    def has(self, step: int) -> bool:
        """See `Saver`."""
        self._settle(required=False)
        return self.newest == Position(step)

    def poll(self) -> None:
        """See `Saver`."""
        if self._pending is None:
            return
        if all(gather_objects(self._pending.written.done())):
            self._settle(required=False)

    def settle(self) -> None:
        """Wait for what is still being written; a failure is told."""
        self._settle(required=False)

    def close(self) -> None:
        """Wait for what is still being written. Raises SaveError where it could not be."""
        self._settle(required=True)

    def export(self, step: int, path: Path) -> None:
        """The weights of a checkpoint as a `.nemo` file. Raises SaveError where it cannot be written."""
        try:
            with agreed():
                if self._is_main:
                    pack_nemo(self._folder.of(Position(step)), path, without=_OWN)
        except RankError as failure:
            raise SaveError(f"{path} could not be written: {failure}") from failure

    # ----------------------------------------------------------------- a checkpoint

    def _begin(
        self, position: Position, state: dict[str, Any], progress: SavedProgress | None, score: float | None
    ) -> None:
        """Plan it, make room for it, and start to write it."""
        actor, optimizer = self._host.actor, self._host.optimizer
        box = [self._folder.partial(position) if self._is_main else None]
        dist.broadcast_object_list(box, src=0)
        partial: Path = box[0]
        tensors = {WEIGHTS: actor.sharded_state_dict(), OPTIMIZER: optimizer_tensors(actor, optimizer)}
        tensors = {name: part for name, part in tensors.items() if any(gather_objects(bool(part)))}
        try:
            with agreed():
                if self._is_main:
                    for name in (*tensors, RANKS):
                        (partial / name).mkdir(parents=True)
            parts = [
                ShardedSave(part, partial / name, copied=self._background) for name, part in tensors.items()
            ]
            needed = sum(gather_objects(sum(part.bytes for part in parts) + _HEADERS))
            with agreed():
                if self._is_main and (free := shutil.disk_usage(partial).free) < needed:
                    raise RuntimeError(
                        f"{partial.parent}: {needed / 2**30:.2f} GiB are needed, {free / 2**30:.2f} are free"
                    )
        except RankError:
            self._drop(partial)
            raise
        own = random_state() | ({} if progress is None else progress.own)
        texts = self._texts(state, progress) if self._is_main else {}
        by_response = progress.by_response if progress is not None and self._is_main else {}

        def write() -> dict[str, FileRecord]:
            paths = [path for part in parts for path in part.write()]
            paths.append(_save_tensors(partial / rank_file(dist.get_rank()), own))
            if by_response:
                paths.append(_save_tensors(partial / f"{PROGRESS}.safetensors", by_response))
            for name, text in texts.items():
                (partial / name).write_text(text + "\n", encoding="utf-8")
                paths.append(partial / name)
            return _records(partial, paths)

        self._pending = _Pending(position, partial, parts, score, self._thread.submit(write))

    def _texts(self, state: dict[str, Any], progress: SavedProgress | None) -> dict[str, str]:
        whole = state | {
            "optimizer_updates": updates_of(self._host.optimizer),
            "layout": own_layout(),
            "failed_saves": self.failed,
            "run": self._about(),
        }
        texts = {STATE: to_json(whole)}
        if progress is not None:
            texts[f"{PROGRESS}.json"] = to_json(progress.numbers)
        return texts

    def _settle(self, *, required: bool) -> None:
        """Wait until the checkpoint under way, if there is one, is complete under its name."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            self._finish(pending)
        except RankError as failure:
            self._drop(pending.partial)
            self._fail(pending.position, failure, required)
        else:
            self.newest = pending.position

    def _finish(self, pending: _Pending) -> None:
        error = pending.written.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        agree(error)
        written = gather_objects(pending.written.result())
        for part in pending.parts:
            part.finish()
        with agreed():
            if self._is_main:
                self._seal(pending, {name: record for of_rank in written for name, record in of_rank.items()})

    def _seal(self, pending: _Pending, records: dict[str, FileRecord]) -> None:
        """Write the small files that are left, name the checkpoint, and let go of older ones."""
        folder = pending.partial
        write_model_files(self._host.actor, folder)
        files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        records |= _records(folder, [path for name, path in files.items() if name not in records])
        self._folder.commit(
            folder,
            Manifest(
                step=pending.position.step,
                updates=pending.position.updates,
                fingerprint=self._fingerprint,
                score=pending.score,
                files=dict(sorted(records.items())),
                versions=_versions(),
            ),
        )
        if self.newest is not None and pending.position < self.newest:
            self._folder.forget_after(pending.position)
        self._folder.retain(
            pending.position, keep_last=self._retention.keep_last, keep_best=self._retention.keep_best
        )

    def _fail(self, position: Position, failure: RankError, required: bool) -> None:
        self.failed += 1
        line = f"checkpoint {position.name} could not be written: {failure}"
        if required:
            raise SaveError(line) from failure
        if self._is_main:
            self._report(line)

    def _drop(self, partial: Path) -> None:
        """What is written of a checkpoint that has failed. The disk may be full of it."""
        if self._is_main:
            shutil.rmtree(partial, ignore_errors=True)


def _versions() -> dict[str, str]:
    """Of what is installed; this package may as well be found by PYTHONPATH."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    # Not `save_file`, whose files their owner alone may read: a run is often read by a group.
    path.write_bytes(
        save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})
    )
    return path


def _records(folder: Path, paths: list[Path]) -> dict[str, FileRecord]:
    """Size and hash of files, which are on the disk afterwards."""
    records = {}
    for path in paths:
        sync_file(path)
        records[str(path.relative_to(folder))] = FileRecord(path.stat().st_size, sha256_of(path))
    return records
