"""Finds the newest checkpoint of a run that can be trusted, and puts it in place."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor

from tepo_nemo.errors import UserError
from tepo_nemo.nemo.agreement import gather_objects
from tepo_nemo.nemo.build import Host
from tepo_nemo.nemo.checkpoint import WEIGHTS
from tepo_nemo.nemo.optimizer_state import load_optimizer, optimizer_tensors
from tepo_nemo.nemo.random_state import restore_random_state, without_generators
from tepo_nemo.nemo.saver import OPTIMIZER, PROGRESS, STATE, own_layout, rank_file
from tepo_nemo.nemo.sharded import load_sharded
from tepo_nemo.runs.checkpoints import (
    CheckpointFolder,
    Position,
    Unusable,
    check_files,
    check_hashes,
    read_manifest,
    share_of,
)
from tepo_nemo.training.progress import SavedProgress, sum_of_shares


@dataclass(frozen=True)
class Found:
    """What a run goes on from."""

    position: Position | None  # None: from its beginning
    notes: list[str]  # a line for each newer checkpoint that was passed over


@dataclass(frozen=True)
class Restored:
    """What was put in place, and what the trainer is to be told."""

    position: Position
    state: dict[str, Any]
    progress: SavedProgress | None
    notes: list[str]


def find_newest(folder: CheckpointFolder, fingerprint: str, *, whole_steps: bool = False) -> Found:
    """The newest checkpoint of this configuration whose files are all as they were written.

    Called by all ranks, which share the reading of the files. What killed saves have left is taken away.

    Args:
        whole_steps: none that was taken between two updates of a step.

    Raises UserError where there are checkpoints and none can be used: to begin again would replace them.
    """
    box: list[list[Position] | None] = [None]
    if dist.get_rank() == 0:
        folder.clean()
        box = [[each for each in folder.positions() if not (whole_steps and each.updates)]]
    dist.broadcast_object_list(box, src=0)
    notes = []
    for position in box[0]:
        try:
            _check(folder.of(position), fingerprint)
        except Unusable as reason:
            notes.append(f"checkpoint {position.name} is passed over: {reason}")
        else:
            return Found(position, notes)
    if notes:
        raise UserError(
            f"output={folder.path.parent}: no checkpoint of the run can be used; {'; '.join(notes)} "
            f"(repair one, or move {folder.path} away to begin again)"
        )
    return Found(None, notes)


def _check(path: Path, fingerprint: str) -> None:
    """Raises Unusable on all ranks where one has found a reason."""
    reason, manifest = None, None
    try:
        manifest = read_manifest(path)
        if manifest.fingerprint != fingerprint:
            raise Unusable("it is of another model or configuration")
        check_files(path, manifest)
        check_hashes(path, manifest, share_of(manifest, dist.get_rank(), dist.get_world_size()))
    except Unusable as unusable:
        reason = str(unusable)
    found = next((text for text in gather_objects(reason) if text is not None), None)
    if found is not None:
        raise Unusable(found)


def read_state(path: Path) -> dict[str, Any]:
    """What the trainer and the run have said of themselves in a checkpoint."""
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def load_checkpoint(host: Host, path: Path) -> Restored:
    """Load weights, optimizer and random generators; called by all ranks, after the reference is kept."""
    actor, optimizer = host.actor, host.optimizer
    state = read_state(path)
    weights = load_sharded({"state_dict": actor.sharded_state_dict()}, path / WEIGHTS)
    actor.on_load_checkpoint(weights)
    tensors = optimizer_tensors(actor, optimizer)
    if (path / OPTIMIZER).is_dir():
        tensors = load_sharded(tensors, path / OPTIMIZER)
    load_optimizer(optimizer, tensors, state["optimizer_updates"])
    notes = []
    own: dict[str, Tensor] = {}
    if state["layout"] == own_layout():
        own = load_file(path / rank_file(dist.get_rank()))
        restore_random_state(own)
    else:
        notes.append(
            f"saved at {_shown(state['layout'])}, goes on at {_shown(own_layout())}: sums are rounded in "
            "another order from here, and the generators of the ranks start anew (the run draws from none)"
        )
    return Restored(Position.of(path.name), state, _progress(path, state["layout"], own), notes)


def _progress(path: Path, layout: dict[str, int], own: dict[str, Tensor]) -> SavedProgress | None:
    """Of a step that was stopped between two updates."""
    numbers = path / f"{PROGRESS}.json"
    if not numbers.is_file():
        return None
    return SavedProgress(
        numbers=json.loads(numbers.read_text(encoding="utf-8")),
        by_response=load_file(path / f"{PROGRESS}.safetensors"),
        own=without_generators(own) if own else _shares(path, layout),
    )


def _shares(path: Path, layout: dict[str, int]) -> dict[str, Tensor]:
    """What the updates of a step have measured at another layout, all of it for the first copy."""
    # Of each copy, the first rank of its last stage: Megatron-core counts tensor ranks first, stages last.
    first = layout["tensor"] * layout["data"] * (layout["pipeline"] - 1)
    ranks = [first + layout["tensor"] * copy for copy in range(layout["data"])]
    whole = sum_of_shares([without_generators(load_file(path / rank_file(rank))) for rank in ranks])
    if parallel_state.get_data_parallel_rank() == 0:
        return whole
    return {name: torch.zeros_like(value) for name, value in whole.items()}


def _shown(layout: dict[str, int]) -> str:
    return "TP{tensor} x PP{pipeline} x DP{data}".format(**layout)
