"""Megatron-core's `torch_dist` format, written and read a piece at a time: no model is ever in memory.

The format is that of `torch.distributed.checkpoint`: tensors cut into chunks, and a `.metadata` file that
says where each lies. Megatron-core adds `metadata.json`, which names the format, and `common.pt`, which has
what belongs to no rank.
"""

import io
import json
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tepo_nemo.conversion.archive import Checkpoint
from tepo_nemo.errors import UserError

# What Megatron-core 0.11 writes.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, which is made when it is written."""

    key: str
    whole: tuple[int, ...]  # shape of the tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, self.offsets)


class _Planner(DefaultSavePlanner):
    """Asks for a chunk's values when its turn has come; PyTorch's own planner has all of them at hand."""

    def __init__(self, chunks: Sequence[Chunk], objects: Mapping[str, bytes], wrote: Callable[[int], None]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks, self._objects, self._wrote = chunks, objects, wrote
        self._loads = {chunk.index: chunk.load for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        tensors = [
            WriteItem(chunk.index, WriteItemType.SHARD, tensor_data=_written(chunk)) for chunk in self._chunks
        ]
        objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        self.plan = SavePlan(tensors + objects)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[write_item.index.fqn])
        values = self._loads[write_item.index]()
        assert values.shape == write_item.tensor_data.chunk.sizes, write_item
        self._wrote(values.nbytes)
        return values.contiguous()


def _written(chunk: Chunk) -> TensorWriteData:
    return TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)),
        properties=TensorProperties(dtype=chunk.dtype),
        size=torch.Size(chunk.whole),
    )


def write_torch_dist(
    folder: Path, chunks: Sequence[Chunk], empty_objects: Sequence[str], wrote: Callable[[int], None]
) -> None:
    """Write a checkpoint into an empty folder.

    Args:
        chunks: that make up all tensors; written, and made, in this order.
        empty_objects: keys under which nothing is kept (`_extra_state`).
        wrote: called with the bytes of each chunk.

    Raises:
        OSError: the disk is full, or another fault of writing.
        What making a chunk raises.
    """
    objects = dict.fromkeys(empty_objects, _saved([None]))
    # One file, and nothing that copies ahead from a GPU: then one chunk at a time is in memory.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    cause = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save({}, storage_writer=writer, planner=_Planner(chunks, objects, wrote))
        except CheckpointException as failed:
            ((cause, _),) = failed.failures.values()
    if cause is not None:
        raise cause  # out here, where it keeps what it was itself caused by
    (folder / "common.pt").write_bytes(_saved({}))
    (folder / "metadata.json").write_text(json.dumps(_FORMAT))


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class TorchDistReader:
    """Reads any part of any tensor, however the run that wrote it was sharded.

    Args:
        checkpoint: that holds it.
        folder: its name there.

    Raises:
        UserError: it is of another format, or cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, folder: str) -> None:
        self._checkpoint, self._folder = checkpoint, folder
        form = self._read_json(f"{folder}/metadata.json").get("sharded_backend")
        if form != _FORMAT["sharded_backend"]:
            raise UserError(
                f"{checkpoint.path}: its weights are in the format {form!r}, and only torch_dist is read "
                "(load it with NeMo, which knows it, and save it again)"
            )
        with checkpoint.open(f"{folder}/.metadata") as file:
            try:
                self._metadata: Metadata = _MetadataUnpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
                raise UserError(
                    f"{checkpoint.path}: {folder}/.metadata cannot be read ({error}); give a whole checkpoint"
                ) from error

    def _read_json(self, name: str) -> dict:
        with self._checkpoint.open(name) as file:
            try:
                return json.load(file)
            except ValueError as error:
                raise UserError(
                    f"{self._checkpoint.path}: {name} is not JSON ({error}); give a whole checkpoint"
                ) from error

    @property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of every tensor."""
        return {
            key: (tuple(stored.size), stored.properties.dtype)
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, key: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The part of a tensor that begins at `offsets`."""
        stored = self._metadata.state_dict_metadata[key]
        asked = ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
        values, found = torch.empty(asked.sizes, dtype=stored.properties.dtype), 0
        for item in create_read_items_for_chunk_list(key, stored, [asked]):
            part = self._load(item.storage_index)[_box(item.storage_offsets, item.lengths)]
            values[_box(item.dest_offsets, item.lengths)] = part
            found += part.numel()
        if found != values.numel():
            raise UserError(f"{self._checkpoint.path}: parts of {key} are missing; give a whole checkpoint")
        return values

    def _load(self, index: MetadataIndex) -> Tensor:
        place = self._metadata.storage_data[index]
        with self._checkpoint.open(f"{self._folder}/{place.relative_path}") as file:
            file.seek(place.offset)
            stored = file.read(place.length)
        if len(stored) < place.length:
            raise UserError(
                f"{self._checkpoint.path}: {self._folder}/{place.relative_path} is cut off (give a whole "
                "checkpoint)"
            )
        return torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)


def _box(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))


class _MetadataUnpickler(pickle.Unpickler):
    """Builds what a `.metadata` file holds and nothing else: a pickle may name any function."""

    _MODULES = (
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.planner",
        "torch.distributed.checkpoint.filesystem",
        "megatron.core.dist_checkpointing.strategies.torch",
    )
    _NAMES = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
            ("pathlib", "Path"),
        }
    )

    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._NAMES:
            return super().find_class(module, name)
        if module in self._MODULES and isinstance(found := super().find_class(module, name), type):
            return found
        raise pickle.UnpicklingError(f"names {module}.{name}")
