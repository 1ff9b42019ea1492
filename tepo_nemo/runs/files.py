"""Files that are complete or absent, and JSON lines that name the line they break at."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tepo_nemo.errors import UserError


def write_atomic(path: Path, text: str) -> None:
    """Replaces the file `path` by `text` as one step: a reader sees the old file or the whole new one."""
    # Not tempfile: it makes files that only their owner may read, and a run is often read by a group.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Make the content of a file survive a crash of the machine."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_new_folder(path: Path) -> None:
    """Raises UserError unless `path` is absent or an empty folder."""
    if path.is_dir():
        if any(path.iterdir()):
            raise UserError(f"{path}: the folder is not empty; choose another one, or move it away")
    elif path.exists():
        raise UserError(f"{path}: is a file; choose the path of a new folder")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `path` that takes its name when the block ends without an error.

    Raises:
        UserError: `path` is a file or a folder that is not empty, or its parent cannot be written.
    """
    path = path.resolve()  # a rename onto a symbolic link would fail
    require_new_folder(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be made ({error.strerror}); choose another folder") from error
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def to_json(fields: Mapping) -> str:
    """`fields` as one line of strict JSON; NaN and infinities, which JSON lacks, become null.

    Everything past ASCII is escaped, so that no response (lone surrogates, line separators) can break a file.
    """
    return json.dumps(_without_non_finite(fields), allow_nan=False)


def _without_non_finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json_lines(path: Path) -> Iterator[tuple[int, dict]]:
    """Yields (line number from 1, object) of a JSON-lines file.

    Raises:
        UserError: the file cannot be read, or a line is not UTF-8, not strict JSON, or not an object; names
            the file and the line.
    """
    try:
        file = open(path, "rb")  # bytes: text mode would also split at U+2028 inside a string
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a file") from error
    with file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, parse_json_object(line)
            except ValueError as error:
                raise UserError(f"{path}:{number}: {error}") from error


def parse_json_object(line: bytes) -> dict:
    """The JSON object of a line.

    Raises:
        ValueError: it is not UTF-8, not strict JSON, or not an object; says which and what to do.
    """
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        is_syntax = isinstance(error, json.JSONDecodeError)
        reason = f"{error.msg} at column {error.colno}" if is_syntax else error
        raise ValueError(f"is not JSON ({reason}); write one JSON object a line") from error
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {type(value).__name__}; write one JSON object a line")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not part of JSON")
