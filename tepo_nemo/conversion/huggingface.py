"""A folder of Hugging Face: its weights, read one at a time, and the files that go along with them."""

import json
import pickle
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tepo_nemo.errors import UserError

CONFIG = "config.json"
_SIDE_FILES = (
    CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template*", "LICENSE*",
)  # fmt: skip
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Stored(NamedTuple):
    """What is known of a tensor before it is read."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | str  # the file's own word for a type that no model here has


def side_files(folder: Path) -> list[Path]:
    """The files that a checkpoint keeps unchanged beside its weights: configuration, tokenizer, licence."""
    found = [path for pattern in _SIDE_FILES for path in folder.glob(pattern) if path.is_file()]
    return sorted(found)


class Safetensors:
    """Weights in `model.safetensors`, or in the files that its index names.

    Raises:
        UserError: a file is missing, cut off, or holds other tensors than the index says.
    """

    NAME = "model.safetensors"

    def __init__(self, folder: Path) -> None:
        self.files = weight_files(folder, self.NAME)
        self.tensors: dict[str, Stored] = {}
        for file in self.files:
            try:
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():
                        part = opened.get_slice(name)
                        dtype = _DTYPES.get(part.get_dtype(), part.get_dtype())
                        self.tensors[name] = Stored(file, tuple(part.get_shape()), dtype)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{file}: is no whole safetensors file ({error}); fetch it again") from error

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Some rows of a tensor.

        The file is opened for each, so that no more of it stays mapped into memory than is being read.
        """
        with safe_open(self.tensors[name].file, "pt") as opened:
            return opened.get_slice(name)[first:last]


class Pickled:
    """The same for `pytorch_model.bin`, read with `weights_only=True`: it builds tensors and nothing else."""

    NAME = "pytorch_model.bin"

    def __init__(self, folder: Path) -> None:
        self.files = weight_files(folder, self.NAME)
        self.tensors: dict[str, Stored] = {}
        for file in self.files:
            self._open(file)
            for name, value in self._opened.items():
                self.tensors[name] = Stored(file, tuple(value.shape), value.dtype)

    def _open(self, file: Path) -> None:
        try:
            self._opened = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{file}: holds no plain weights ({reason}); give safetensors") from error
        self._file = file

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Some rows of a tensor."""
        if self.tensors[name].file != self._file:
            self._open(self.tensors[name].file)
        return self._opened[name][first:last]


def open_weights(folder: Path, *, allow_pickle: bool) -> Safetensors | Pickled:
    """The weights of a folder; safetensors where it has them.

    Args:
        allow_pickle: take `pytorch_model.bin` where it has none.
    """
    if _has(folder, Safetensors.NAME):
        return Safetensors(folder)
    if not _has(folder, Pickled.NAME):
        raise UserError(
            f"{folder}: has no {Safetensors.NAME} and no index of one (give a folder with weights)"
        )
    if not allow_pickle:
        raise UserError(
            f"{folder}: has weights in {Pickled.NAME} alone, which is a pickle (save it as safetensors, or "
            "add --pickle to read it with weights_only=True)"
        )
    return Pickled(folder)


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file() or index_of(folder, name).is_file()


def index_of(folder: Path, name: str) -> Path:
    """The file that says which of several weight files has which tensor."""
    return folder / f"{name}.index.json"


def weight_files(folder: Path, name: str) -> list[Path]:
    """The files with the weights: those that the index names, or the only one."""
    index = index_of(folder, name)
    if not index.is_file():
        return [folder / name]
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / file for file in sorted(set(named))]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index}: is no index of weights ({error}); fetch it again") from error
    for file in files:
        if file.parent != folder or not file.is_file():
            raise UserError(f"{file}: is missing, {index.name} names it (fetch it again)")
    return files
