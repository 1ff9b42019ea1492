"""Writes weights as a `.nemo` file that appears only when it is complete."""

import os
import shutil
import tarfile
from pathlib import Path

import torch.distributed as dist

from tepo_nemo.conversion.archive import ORIGIN
from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel
from tepo_nemo.nemo.agreement import agreed
from tepo_nemo.nemo.sharded import ShardedSave

WEIGHTS = "model_weights"


def save_nemo(actor: MegatronGPTTEPOActorModel, path: Path) -> None:
    """Save the model's weights and configuration; called by all ranks.

    All of it happens in a folder beside the file, and the finished file is renamed into place: an interrupted
    save leaves nothing that looks like a checkpoint, and nothing that a later save would trip over.

    Raises RankError on all ranks where a rank cannot write.
    """
    partial = path.with_name(f".{path.name}.partial")
    is_main = dist.get_rank() == 0
    try:
        with agreed():
            if is_main:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / WEIGHTS).mkdir(parents=True)
        weights = ShardedSave(actor.sharded_state_dict(), partial / WEIGHTS, copied=False)
        with agreed():
            weights.write()
        weights.finish()
        with agreed():
            if is_main:
                write_model_files(actor, partial)
                pack_nemo(partial, path)
    finally:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)


def write_model_files(actor: MegatronGPTTEPOActorModel, folder: Path) -> None:
    """What a `.nemo` has besides the weights.

    The configuration, files of the tokenizer if it has any, and what it takes to make a folder of Hugging
    Face of it again.
    """
    file = str(folder / "model_config.yaml")
    actor.to_config_file(path2yaml_file=file)
    if getattr(actor, "artifacts", None) is not None:
        connector = actor._save_restore_connector
        connector._handle_artifacts(actor, nemo_file_folder=str(folder))
        connector._update_artifact_paths(actor, path2yaml_file=file)
    for name, content in actor.huggingface_files.items():
        (folder / ORIGIN).mkdir(exist_ok=True)
        (folder / ORIGIN / name).write_bytes(content)


def pack_nemo(folder: Path, path: Path, without: frozenset[str] = frozenset()) -> None:
    """Make the folder's content, but for the names at its top in `without`, the `.nemo` file `path`."""

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if entry.name.removeprefix("./").split("/")[0] in without else entry

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:") as archive:
                archive.add(folder, arcname=".", filter=wanted)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
