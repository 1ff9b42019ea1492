"""One conversion, from what the source is to what it becomes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tepo_nemo.conversion.archive import CONFIG, ORIGIN, WEIGHTS, Checkpoint
from tepo_nemo.conversion.families import Architecture
from tepo_nemo.conversion.huggingface import CONFIG as HUGGINGFACE_CONFIG
from tepo_nemo.conversion.huggingface import open_weights, side_files
from tepo_nemo.conversion.manifest import Hashes, check_hashes, hash_files, read_manifest, write_manifest
from tepo_nemo.conversion.nemo_config import nemo_config, read_architecture
from tepo_nemo.conversion.output import check_room, new_checkpoint
from tepo_nemo.conversion.to_huggingface import check_tensors, write_huggingface
from tepo_nemo.conversion.to_nemo import check_weights, write_nemo
from tepo_nemo.conversion.torch_dist import TorchDistReader
from tepo_nemo.conversion.weights import total_bytes
from tepo_nemo.errors import UserError


class Watcher(Protocol):
    """Who is told how far a conversion is."""

    def begin(self, stage: str, size: int) -> None:
        """A stage that will see `size` bytes."""

    def advance(self, count: int) -> None:
        """Bytes that the stage has seen since the last call."""


@dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    family: str
    size: int  # bytes of weights
    seconds: float  # of all of it, hashes included


def convert(
    source: Path,
    output: Path,
    *,
    sequence_length: int | None = None,
    allow_pickle: bool = False,
    watcher: Watcher,
) -> Converted:
    """Convert a folder of Hugging Face to a NeMo checkpoint, or a NeMo checkpoint to such a folder.

    Args:
        source: what it is decides the direction.
        output: a new folder or, for a NeMo checkpoint, a new file that ends in `.nemo`.
        sequence_length: of a NeMo checkpoint, the longest sequence to train on; None for the model's own.
        allow_pickle: read a folder's `pytorch_model.bin` where it has no safetensors.

    Raises:
        UserError: the source cannot be converted, or the output cannot be written; nothing is left behind.
    """
    started = time.monotonic()
    if (source / HUGGINGFACE_CONFIG).is_file():
        work = _to_nemo(source, output, sequence_length, allow_pickle)
    elif source.is_file() or (source / CONFIG).is_file():
        _refuse_options(sequence_length, allow_pickle)
        work = _to_huggingface(source, output)
    else:
        raise UserError(
            f"{source}: is no folder of Hugging Face (with a {HUGGINGFACE_CONFIG}) and no NeMo checkpoint (a "
            f".nemo file, or a folder with a {CONFIG}); correct the path, or fetch the model first with "
            "huggingface-cli download NAME --local-dir FOLDER"
        )
    architecture = work.architecture
    size = total_bytes(architecture)
    check_room(output.resolve(), 2 * size if output.suffix == ".nemo" else size)
    with new_checkpoint(output) as folder:
        of_source = _hash_source(work, watcher)
        watcher.begin("converting", size)
        work.write(folder, watcher.advance)
        watcher.begin("hashing the result", size)
        write_manifest(
            folder,
            family=architecture.family.name,
            source=source.resolve().name,
            of_source=of_source,
            read=watcher.advance,
        )
    return Converted(architecture.family.name, size, time.monotonic() - started)


@dataclass(frozen=True)
class _Work:
    """A conversion that nothing speaks against."""

    architecture: Architecture
    files: Checkpoint  # of the source
    names: list[str]  # of those files of it that are read
    covers: tuple[str, ...]  # how the names begin that its manifest may have of them
    write: Callable[[Path, Callable[[int], None]], None]


def _to_nemo(source: Path, output: Path, sequence_length: int | None, allow_pickle: bool) -> _Work:
    where = source / HUGGINGFACE_CONFIG
    architecture = Architecture.of(where.read_bytes(), str(where))
    weights = open_weights(source, allow_pickle=allow_pickle)
    check_weights(source, weights, architecture)
    # An archive has no lasting folder of its own that NeMo could take a tokenizer from.
    tokenizer = source if output.suffix == ".nemo" else output / ORIGIN
    config = nemo_config(architecture, tokenizer=tokenizer.resolve(), sequence_length=sequence_length)
    return _Work(
        architecture,
        Checkpoint(source),
        [file.name for file in (*side_files(source), *weights.files)],
        ("",),
        lambda folder, wrote: write_nemo(folder, source, weights, architecture, config, wrote),
    )


def _to_huggingface(source: Path, output: Path) -> _Work:
    if output.suffix == ".nemo":
        raise UserError(f"{output}: a NeMo checkpoint becomes a folder of Hugging Face (give a folder)")
    checkpoint = Checkpoint(source)
    architecture = read_architecture(checkpoint)
    reader = TorchDistReader(checkpoint, WEIGHTS)
    check_tensors(checkpoint, reader, architecture)
    return _Work(
        architecture,
        checkpoint,
        [CONFIG, *checkpoint.names(WEIGHTS), *checkpoint.names(ORIGIN)],
        (CONFIG, f"{WEIGHTS}/", f"{ORIGIN}/"),  # a run's checkpoint has an optimizer, too
        lambda folder, wrote: write_huggingface(folder, checkpoint, reader, architecture, wrote),
    )


def _refuse_options(sequence_length: int | None, allow_pickle: bool) -> None:
    for option, is_given in (("--sequence-length", sequence_length is not None), ("--pickle", allow_pickle)):
        if is_given:
            raise UserError(f"{option}: says nothing about a NeMo checkpoint (remove it)")


def _hash_source(work: _Work, watcher: Watcher) -> Hashes:
    """The hashes of what is read, held against the source's own manifest where it has one."""
    said = {name: file for name, file in read_manifest(work.files).items() if name.startswith(work.covers)}
    names = sorted({*work.names, *(said.keys() & set(work.files.names()))})
    watcher.begin("hashing the source", 0)
    found = hash_files(work.files, names, watcher.advance)
    check_hashes(work.files, said, found)
    return found
