"""Writes weights as a `.nemo` file that appears only when it is complete, and reads them at any layout."""

import io
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from tepo_nemo.conversion.archive import ORIGIN
from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel


def save_nemo(actor: MegatronGPTTEPOActorModel, path: Path) -> None:
    """Save the model's weights and configuration; called by all ranks.

    NeMo spreads shards beside the file before it packs them, so all of it happens in a folder of its own,
    and the finished file is renamed into place: an interrupted save leaves nothing that looks like a
    checkpoint, and nothing that a later save would trip over.
    """
    partial = path.with_name(f".{path.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        actor.save_to(str(partial / path.name))
    finally:
        # Megatron-core keeps a process for the answers of its writers. Letting go of it ends it; a rank that
        # ends without clean-up would leave it behind.
        filesystem_async._results_queue = None
    dist.barrier()
    if dist.get_rank() == 0:
        _add_origin(partial / path.name, actor.huggingface_files)
        os.replace(partial / path.name, path)
        shutil.rmtree(partial)
    dist.barrier()


def _add_origin(archive: Path, files: Mapping[str, bytes]) -> None:
    """What it takes to make a folder of Hugging Face of the checkpoint again."""
    with tarfile.open(archive, "a:") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{ORIGIN}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@contextmanager
def any_vocabulary_padding() -> Iterator[None]:
    """Let weights be loaded whose vocabulary was padded for another tensor-parallel size.

    Megatron-core asks for this itself: it compares all shapes but those of the embedding and the output
    layer, and fills rows that the file lacks with zeros. Recent versions of PyTorch then compare sizes once
    more and know of no exception.
    """
    create_local_plan = MCoreLoadPlanner.create_local_plan

    def with_own_sizes(planner: MCoreLoadPlanner) -> LoadPlan:
        planner._validate_global_shapes(planner.metadata, planner.shapes_validation_sharded_tensors)
        saved = planner.metadata.state_dict_metadata
        for name, tensor in planner.state_dict.items():
            if name in saved and hasattr(saved[name], "size"):
                saved[name].size = tensor.size()
        return create_local_plan(planner)

    with patch.object(MCoreLoadPlanner, "create_local_plan", with_own_sizes):
        yield
