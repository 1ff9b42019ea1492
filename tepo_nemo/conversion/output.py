"""Results that are whole or absent."""

import errno
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import require_new_folder

_SPARE_BYTES = 64 << 20  # what else is written: tokenizer, configuration, indices
_GIB = 1 << 30


def check_room(path: Path, size: int) -> None:
    """Raises UserError where the disk that `path` will be on has less room than `size` bytes and a little."""
    parent = next(parent for parent in path.parents if parent.exists())
    needed, free = size + _SPARE_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(
            f"{path}: takes {needed / _GIB:.2f} GiB and its disk has {free / _GIB:.2f} GiB left (make room, "
            "or choose another disk)"
        )


@contextmanager
def new_checkpoint(path: Path) -> Iterator[Path]:
    """Yields a folder that becomes `path`, or the archive of that name, when the block ends without an error.

    What an interrupted call has left beside `path` is removed: nothing is taken up again.

    Raises:
        UserError: `path` exists, cannot be made, or the disk is full.
    """
    path = path.resolve()
    packed = path.suffix == ".nemo"
    if packed and path.exists():
        raise UserError(f"{path}: exists already; choose another name, or move it away")
    if not packed:
        require_new_folder(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with _full_disk_is_a_mistake(path):
            _make_folder(partial, path)
            yield partial
            _sync(partial)
            os.replace(_pack(partial) if packed else partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_folder(partial: Path, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(path.name)}\.\d+\.partial", left.name):
                shutil.rmtree(left)
        partial.mkdir()
    except OSError as error:
        if _is_full_disk(error):
            raise
        raise UserError(f"{path}: cannot be made ({error.strerror}); choose another place") from error


def _pack(folder: Path) -> Path:
    """An archive of the files in a folder, within it."""
    archive = folder / "packed"
    names = sorted(os.listdir(folder))
    with tarfile.open(archive, "w:") as tar:
        for name in names:
            tar.add(folder / name, f"./{name}")
    _sync(archive)
    return archive


def _sync(path: Path) -> None:
    """Have the disk hold what is written before it gets its name."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())


@contextmanager
def _full_disk_is_a_mistake(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if not _is_full_disk(error):
            raise
        raise UserError(f"{path}: its disk is full (make room, or choose another disk)") from error


def _is_full_disk(error: BaseException | None) -> bool:
    """Also where it was met on the way: PyTorch, told of it in the middle of a file, fails at its end.

    safetensors passes the operating system's words on, but not its number.
    """
    if error is None:
        return False
    full = (errno.ENOSPC, errno.EDQUOT)
    is_it = getattr(error, "errno", None) in full or any(os.strerror(one) in str(error) for one in full)
    return is_it or _is_full_disk(error.__context__)
