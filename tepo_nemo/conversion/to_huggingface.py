"""From a NeMo checkpoint to a folder of Hugging Face that transformers loads."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from tepo_nemo.conversion.archive import ORIGIN, Checkpoint
from tepo_nemo.conversion.families import Architecture
from tepo_nemo.conversion.huggingface import Safetensors, index_of
from tepo_nemo.conversion.to_nemo import KEY_PREFIX
from tepo_nemo.conversion.torch_dist import TorchDistReader
from tepo_nemo.conversion.weights import (
    Shape,
    Weight,
    huggingface_shapes,
    in_order,
    split_groups,
    total_bytes,
    weights_of,
)
from tepo_nemo.errors import UserError

FILE_BYTES = 1 << 30
"""Weights of a file at most, unless a single one is larger; a file is held in memory while it is made."""


class WeightReader(Protocol):
    """Where the weights of a NeMo model are, in a file or in running ranks."""

    def read(self, key: str, offsets: Shape, shape: Shape) -> Tensor:
        """The part of a tensor that begins at `offsets`."""
        ...


def check_tensors(checkpoint: Checkpoint, reader: TorchDistReader, architecture: Architecture) -> None:
    """Hold the tensors of a checkpoint against the kept list.

    Raises:
        UserError: one is missing, is not of the model, or has a shape that its config.json does not give it.
    """
    found, sizes = reader.tensors, architecture.sizes
    expected = {KEY_PREFIX + weight.nemo: weight for weight in weights_of(architecture)}
    for key, weight in expected.items():
        if key not in found:
            raise UserError(f"{checkpoint.path}: the weight {key} is missing (give a whole checkpoint)")
        shape = (sizes.layers, *weight.shape(sizes)) if weight.in_layers else weight.shape(sizes)
        stored, _ = found[key]
        if weight.made == "of the vocabulary":  # padded for another layout, perhaps
            fits = stored[1:] == shape[1:] and stored[0] >= sizes.vocabulary
        else:
            fits = stored == shape
        if not fits:
            raise UserError(
                f"{checkpoint.path}: {key} has the shape {list(stored)}, its {ORIGIN}/config.json means "
                f"{list(shape)} (give the checkpoint of that model)"
            )
    for key in found:
        if key not in expected:
            raise UserError(
                f"{checkpoint.path}: {key} is no weight of {architecture.family.architecture} as its "
                f"{ORIGIN}/config.json describes it (give a checkpoint of the model alone)"
            )


def write_huggingface(
    folder: Path,
    checkpoint: Checkpoint,
    reader: TorchDistReader,
    architecture: Architecture,
    wrote: Callable[[int], None],
) -> None:
    """Fill an empty folder with the weights, the model's own config.json, and its tokenizer.

    Args:
        reader: of the checkpoint's weights, checked.
        wrote: told of the bytes of weights as they are written.
    """
    for name in checkpoint.names(ORIGIN):
        (folder / Path(name).name).write_bytes(checkpoint.read(name))
    save_weights(folder, architecture, huggingface_weights(reader, architecture), wrote)


def save_weights(
    folder: Path,
    architecture: Architecture,
    weights: Iterator[tuple[str, Tensor]],
    wrote: Callable[[int], None],
) -> None:
    """Write safetensors, and the index of them where there are several files.

    Args:
        weights: of `huggingface_weights`; one file's are in memory at once.
        wrote: told of the bytes of weights as they are written.
    """
    shapes = huggingface_shapes(architecture)
    width = getattr(torch, architecture.dtype).itemsize
    files = _files({name: math.prod(shape) * width for name, shape in shapes.items()})
    for file, names in files.items():
        tensors = {}
        for _ in names:
            name, value = next(weights)
            tensors[name] = value
            wrote(value.nbytes)
        assert tensors.keys() == set(names)
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": total_bytes(architecture)},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        index_of(folder, Safetensors.NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(sizes: dict[str, int]) -> dict[str, list[str]]:
    """Which file has which weights, filled one after the other; `sizes` in bytes."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = FILE_BYTES
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {Safetensors.NAME: groups[0]}
    stem = Safetensors.NAME.removesuffix(".safetensors")
    return {
        f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def huggingface_weights(reader: WeightReader, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """All weights by their names on Hugging Face, in the order of `huggingface_shapes`."""
    dtype = getattr(torch, architecture.dtype)
    for weight, layer in in_order(architecture):
        parts = _parts(reader, weight, layer, architecture)
        for name, part in zip(weight.names(layer), parts, strict=True):
            yield name, part.to(dtype).contiguous()


def _parts(reader: WeightReader, weight: Weight, layer: int, architecture: Architecture) -> Iterator[Tensor]:
    sizes, key = architecture.sizes, KEY_PREFIX + weight.nemo

    def read(first_row: int, shape: Shape) -> Tensor:
        others = [0] * (len(shape) - 1)
        if not weight.in_layers:
            return reader.read(key, (first_row, *others), shape)
        return reader.read(key, (layer, first_row, *others), (1, *shape)).squeeze(0)

    if weight.made == "by group":
        yield from split_groups(read(0, weight.shape(sizes)), sizes)
    else:
        first = 0
        for shape in weight.part_shapes(sizes):
            yield read(first, shape)
            first += shape[0]
