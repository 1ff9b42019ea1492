"""The files of a NeMo checkpoint, which is a folder or one `.nemo` archive of it."""

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tepo_nemo.errors import UserError

CONFIG = "model_config.yaml"
WEIGHTS = "model_weights"
ORIGIN = "huggingface"
"""Folder within a checkpoint for what the model has on Hugging Face: its config.json, its tokenizer."""


def is_compressed(path: Path) -> bool:
    """Whether a file is an archive whose members cannot be read but all in a row; NeMo used to write such."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


class Checkpoint:
    """Reads files of a checkpoint by their path within it.

    Raises:
        UserError: the path is no folder and no archive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._members: dict[str, tarfile.TarInfo] = {}
        self._archive: tarfile.TarFile | None = None
        if path.is_dir():
            return
        if is_compressed(path):
            raise UserError(f"{path}: is compressed (unpack it, and give the folder)")
        try:
            self._archive = tarfile.open(path, "r:")
        except (tarfile.TarError, OSError) as error:
            raise UserError(
                f"{path}: is no .nemo archive ({error}); give a .nemo file or its folder"
            ) from error
        self._members = {
            member.name.removeprefix("./"): member for member in self._archive.getmembers() if member.isfile()
        }

    def names(self, folder: str = "") -> list[str]:
        """Paths of all files, or of those in a folder, sorted."""
        if self._archive is not None:
            names = list(self._members)
        else:
            found = (path for path in (self.path / folder).rglob("*") if path.is_file())
            names = [str(path.relative_to(self.path)) for path in found]
        return sorted(name for name in names if not folder or name.startswith(f"{folder}/"))

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A file to read from; UserError where it is missing."""
        if self._archive is not None:
            if name not in self._members:
                raise UserError(f"{self.path}: {name} is missing; give a whole checkpoint")
            file = self._archive.extractfile(self._members[name])
        else:
            try:
                file = open(self.path / name, "rb")
            except OSError as error:
                raise UserError(
                    f"{self.path}: {name} cannot be read ({error.strerror}); give a whole checkpoint"
                ) from error
        with file:
            yield file

    def read(self, name: str) -> bytes:
        """All of a file."""
        with self.open(name) as file:
            return file.read()
