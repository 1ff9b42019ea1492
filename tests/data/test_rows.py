"""Rows of every form that sets are published in; damage is found whatever the form."""

import gzip
import json

import pytest

from tepo_nemo.data.rows import read_rows
from tepo_nemo.errors import UserError

ROWS = [{"problem": "1+1", "answer": 2.0}, {"problem": "größer\u2028", "answer": "3"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def parquet_bytes(folder, rows):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "made.parquet")
    return (folder / "made.parquet").read_bytes()


def read(folder, content):
    (folder / "file").write_bytes(content)
    return list(read_rows(folder / "file"))


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        gzip.compress(LINES),
        LINES.rstrip(),
        json.dumps(ROWS, indent=1).encode(),
        gzip.compress(b"\n " + json.dumps(ROWS).encode()),
    ],
    ids=["lines", "packed lines", "no last line break", "array", "packed array"],
)
def test_every_form_gives_the_same_rows(tmp_path, content):
    assert [(row.number, row.fields) for row in read(tmp_path, content)] == [(1, ROWS[0]), (2, ROWS[1])]


def test_parquet_gives_nested_rows_and_counts_over_batches(tmp_path):
    rows = [{"prompt": [{"content": f"p{n}", "role": "user"}], "n": n} for n in range(5000)]
    found = read(tmp_path, parquet_bytes(tmp_path, rows))
    assert [row.number for row in found] == list(range(1, 5001))
    assert [row.fields for row in found] == rows


def test_blank_lines_are_no_rows_and_keep_the_numbers(tmp_path):
    assert [row.number for row in read(tmp_path, b'{"a": 1}\n\n \n{"a": 2}\n')] == [1, 4]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', "is not JSON"),
        (b"[1]", "is a JSON list"),
        (b'{"a": NaN}', "NaN is not part of JSON"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
    ],
)
def test_a_broken_line_is_a_row_with_a_reason(tmp_path, line, reason):
    good, broken, last = read(tmp_path, b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    assert (broken.number, broken.fields) == (2, None)
    assert reason in broken.reason
    assert (good.fields, last.fields) == ({"a": 1}, {"a": 2})


def test_an_array_may_hold_what_is_no_object(tmp_path):
    first, second = read(tmp_path, b'[{"a": 1}, 7]')
    assert (first.fields, second.fields, second.reason) == ({"a": 1}, None, "is a JSON int and no object")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (gzip.compress(LINES)[:-20], "is damaged or truncated"),
        (gzip.compress(LINES * 100)[:60] + b"junk" * 30, "is damaged or truncated|cannot be read"),
        (json.dumps(ROWS).encode()[:-9], "is no whole JSON array"),
        (b'[{"a": "\xff"}]', "byte 8 is not UTF-8"),
    ],
    ids=["empty", "truncated gzip", "broken gzip", "truncated array", "array not UTF-8"],
)
def test_a_damaged_file_is_refused(tmp_path, content, message):
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path, content)
    assert str(error.value).startswith(f"{tmp_path}/file: ")


def test_truncated_parquet_is_refused(tmp_path):
    content = parquet_bytes(tmp_path, ROWS[1:])
    with pytest.raises(UserError, match="is damaged or truncated parquet"):
        read(tmp_path, content[:-30])


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs pyarrow \(.*pip install 'tepo-nemo\[parquet\]'"):
        read(tmp_path, b"PAR1junk")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="none: cannot be read"):
        list(read_rows(tmp_path / "none"))
