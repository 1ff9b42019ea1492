"""From a folder of Hugging Face to the folder of a NeMo checkpoint."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tepo_nemo.conversion.archive import CONFIG, ORIGIN, WEIGHTS
from tepo_nemo.conversion.families import Architecture
from tepo_nemo.conversion.huggingface import Pickled, Safetensors, side_files
from tepo_nemo.conversion.torch_dist import Chunk, write_torch_dist
from tepo_nemo.conversion.weights import (
    Weight,
    extra_state_keys,
    huggingface_shapes,
    in_order,
    join_groups,
)
from tepo_nemo.errors import UserError

KEY_PREFIX = "model."
_BLOCK_BYTES = 1 << 26  # of the embedding's rows that are copied at once


def check_weights(folder: Path, weights: Safetensors | Pickled, architecture: Architecture) -> None:
    """Hold the tensors of a folder against the kept list.

    Raises:
        UserError: one is missing, is not of the model, or has another shape or type than config.json says.
    """
    expected, dtype = huggingface_shapes(architecture), getattr(torch, architecture.dtype)
    found = dict(weights.tensors)
    if architecture.tied and "lm_head.weight" in found:
        _check_tied(folder, weights, architecture)
        del found["lm_head.weight"]
    for name in expected:
        if name not in found:
            raise UserError(f"{folder}: the weight {name} is missing (fetch the model again)")
    for name, stored in found.items():
        if name not in expected:
            raise UserError(
                f"{folder}: {name} is no weight of {architecture.family.architecture} as its config.json "
                "describes it (give an unchanged model, adapters merged)"
            )
        if stored.shape != expected[name]:
            raise UserError(
                f"{folder}: {name} has the shape {list(stored.shape)}, its config.json says "
                f"{list(expected[name])} (fetch the model again)"
            )
        if stored.dtype != dtype:
            raise UserError(
                f"{folder}: {name} is {_word(stored.dtype)}, its config.json says "
                f"torch_dtype={architecture.dtype} (correct torch_dtype, or cast the weights)"
            )


def _word(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tied(folder: Path, weights: Safetensors | Pickled, architecture: Architecture) -> None:
    """A file may repeat the embedding as the output layer; then it must be the same."""
    names = "model.embed_tokens.weight", "lm_head.weight"
    shape = architecture.sizes.vocabulary, architecture.sizes.hidden
    if any(name not in weights.tensors or weights.tensors[name].shape != shape for name in names):
        return  # said of the embedding by the list, and the output layer does not count
    for first, last in _blocks(*shape):
        if not torch.equal(*(weights.rows(name, first, last) for name in names)):
            raise UserError(
                f"{folder}: lm_head.weight differs from the embedding and its config.json ties them (set "
                "tie_word_embeddings=false)"
            )


def write_nemo(
    folder: Path,
    source: Path,
    weights: Safetensors | Pickled,
    architecture: Architecture,
    config: str,
    wrote: Callable[[int], None],
) -> None:
    """Fill an empty folder with a checkpoint.

    Args:
        weights: of `source`, checked.
        config: the text of `model_config.yaml`.
        wrote: told of the bytes of weights as they are written.
    """
    (folder / CONFIG).write_text(config, encoding="utf-8")
    (folder / ORIGIN).mkdir()
    for file in side_files(source):
        shutil.copyfile(file, folder / ORIGIN / file.name)
    (folder / WEIGHTS).mkdir()
    chunks = [
        chunk
        for weight, layer in in_order(architecture)
        for chunk in _chunks(weight, layer, architecture, weights)
    ]
    empty = [KEY_PREFIX + key for key in extra_state_keys(architecture)]
    write_torch_dist(folder / WEIGHTS, chunks, empty, wrote)


def _chunks(
    weight: Weight, layer: int, architecture: Architecture, source: Safetensors | Pickled
) -> Iterator[Chunk]:
    sizes, dtype = architecture.sizes, getattr(torch, architecture.dtype)
    whole, names = weight.shape(sizes), weight.names(layer)
    leading = (sizes.layers,) if weight.in_layers else ()

    def chunk(first_row: int, rows: int, load: Callable[[], Tensor]) -> Chunk:
        shape = (rows, *whole[1:])
        return Chunk(
            key=KEY_PREFIX + weight.nemo,
            whole=(*leading, *whole),
            offsets=(*(layer for _ in leading), first_row, *(0 for _ in whole[1:])),
            shape=(*(1 for _ in leading), *shape),
            dtype=dtype,
            load=lambda: load().reshape(*(1 for _ in leading), *shape),
        )

    def rows(name: str, first: int, last: int) -> Callable[[], Tensor]:
        return partial(source.rows, name, first, last)

    if weight.made == "by group":
        parts = [
            rows(name, 0, shape[0]) for name, shape in zip(names, weight.part_shapes(sizes), strict=True)
        ]
        yield chunk(0, whole[0], lambda: join_groups(*(part() for part in parts), sizes))
    elif weight.made == "of the vocabulary":
        for first, last in _blocks(sizes.vocabulary, sizes.hidden):
            yield chunk(first, last - first, rows(names[0], first, last))
        if padding := whole[0] - sizes.vocabulary:
            yield chunk(sizes.vocabulary, padding, lambda: torch.zeros(padding, sizes.hidden, dtype=dtype))
    else:
        first = 0
        for name, shape in zip(names, weight.part_shapes(sizes), strict=True):
            yield chunk(first, shape[0], rows(name, 0, shape[0]))
            first += shape[0]


def _blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK_BYTES // (4 * width))
    yield from ((first, min(first + step, rows)) for first in range(0, rows, step))
