"""Megatron-core 0.11 writes checkpoints through a private function of PyTorch, which has gained arguments."""

import inspect
from typing import Any

import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
from torch.distributed.checkpoint import filesystem


def patch() -> None:
    """Give Megatron-core a `_write_item` of the signature it calls. PyTorch below 2.7 has it already."""
    if "transforms" in inspect.signature(filesystem._write_item).parameters:
        writer._write_item = _write_item


def _write_item(stream: Any, data: Any, write_item: Any, storage_key: str) -> Any:
    transforms = filesystem._StorageWriterTransforms()
    torch_save = filesystem.SerializationFormat.TORCH_SAVE
    return filesystem._write_item(transforms, stream, data, write_item, storage_key, torch_save)
