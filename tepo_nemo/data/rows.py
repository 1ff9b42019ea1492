"""Rows of a published file: JSON lines, one JSON array, or parquet; any of them may be packed with gzip."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import parse_json_object

_PARQUET, _GZIP = b"PAR1", b"\x1f\x8b"
_ROWS_AT_ONCE = 4096  # of a parquet file in memory


class Row(NamedTuple):
    """One row of a file."""

    number: int  # its line, or its place in an array or a table, from 1
    fields: dict | None  # None where it cannot be read
    reason: str = ""  # why not


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file in their order; its form is told by its first bytes, not by its name.

    A line that is no JSON object is a row with a reason; a blank line is none.

    Raises:
        UserError: the file cannot be opened, is truncated, empty or damaged as a whole, or is parquet and
            pyarrow is not installed.
    """
    try:
        start = _first_bytes(path)
        if start.startswith(_PARQUET):
            rows = _parquet_rows(path)
        elif start.lstrip().startswith(b"["):
            rows = _array_rows(path)
        else:
            rows = _line_rows(path)
        yield from rows
    except OSError as error:  # gzip says BadGzipFile, which has no strerror
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: is damaged or truncated ({error}); get the file again") from error


def _open(path: Path) -> IO[bytes]:
    file = open(path, "rb")
    packed = file.read(2) == _GZIP
    file.seek(0)
    return gzip.open(file) if packed else file


def _first_bytes(path: Path) -> bytes:
    with _open(path) as file:
        start = file.read(512)
    if not start:
        raise UserError(f"{path}: is empty; get the file again")
    return start


def _line_rows(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(number, line)


def _parsed(number: int, line: bytes) -> Row:
    try:
        return Row(number, parse_json_object(line))
    except ValueError as error:
        return Row(number, None, str(error))


def _array_rows(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        text = file.read()
    try:
        rows = json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no whole JSON array ({error}); get the file again") from error
    for number, fields in enumerate(rows, start=1):
        if isinstance(fields, dict):
            yield Row(number, fields)
        else:
            yield Row(number, None, f"is a JSON {type(fields).__name__} and no object")


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{path}: is parquet, which needs pyarrow ({error}; pip install 'tepo-nemo[parquet]')"
        ) from error
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=_ROWS_AT_ONCE):
            for fields in batch.to_pylist():
                number += 1
                yield Row(number, fields)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is damaged or truncated parquet ({error}); get the file again") from error
