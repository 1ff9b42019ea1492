"""Writes weights as a `.nemo` file that appears only when it is complete."""

import os
import shutil
from pathlib import Path

import torch.distributed as dist

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
    actor.save_to(str(partial / path.name))
    dist.barrier()
    if dist.get_rank() == 0:
        os.replace(partial / path.name, path)
        shutil.rmtree(partial)
    dist.barrier()
