import json
import os
import stat

import pytest

from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import new_folder, read_json_lines, to_json, write_atomic


def test_atomic_write_replaces_the_whole_text(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, "a much longer first text\n")
    write_atomic(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    assert os.listdir(tmp_path) == ["file"]


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o022)
    try:
        write_atomic(tmp_path / "file", "x")
        with new_folder(tmp_path / "folder") as partial:
            (partial / "inside").write_text("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o755


def test_new_folder_appears_when_the_block_ends(tmp_path):
    target = tmp_path / "deep" / "target"
    with new_folder(target) as partial:
        (partial / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert os.listdir(target.parent) == ["target"]


def test_new_folder_leaves_nothing_after_an_error(tmp_path):
    with pytest.raises(RuntimeError):
        with new_folder(tmp_path / "target") as partial:
            (partial / "file").write_text("x")
            raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_new_folder_takes_an_empty_folder_and_a_link_to_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_folder(tmp_path / "link") as partial:
        (partial / "file").write_text("x")
    assert (tmp_path / "real" / "file").read_text() == "x"
    assert (tmp_path / "link").is_symlink()


def test_new_folder_refuses_what_is_there_already(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, reason in (("full", "not empty"), ("file", "is a file"), ("file/below", "cannot be made")):
        with pytest.raises(UserError, match=reason) as error:
            with new_folder(tmp_path / name):
                raise AssertionError("the block must not run")
        assert name in str(error.value)
    assert (tmp_path / "full" / "precious").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]


def test_json_is_strict_and_ascii():
    hostile = "\ud800 \u2028 \n 😀"
    line = to_json({"nan": float("nan"), "inf": float("-inf"), "deep": {"x": float("inf")}, "text": hostile})
    assert line.isascii() and "\n" not in line
    assert json.loads(line) == {"nan": None, "inf": None, "deep": {"x": None}, "text": hostile}


def test_lines_are_split_at_newlines_only(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"a": "one\u2028line\u0085"}\r\n{"a": 2}', encoding="utf-8")
    assert list(read_json_lines(path)) == [(1, {"a": "one\u2028line\u0085"}), (2, {"a": 2})]


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"{'a': 1}", "not JSON"),
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b'{"a": NaN}', "NaN is not part of JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[1]", "JSON list"),
        (b"null", "JSON NoneType"),
        ('{"a": "é"}'.encode("latin-1"), "byte 7 is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    ],
)
def test_broken_line_is_named(tmp_path, line, reason):
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(UserError, match=reason) as error:
        list(read_json_lines(path))
    assert str(error.value).startswith(f"{path}:2: ") and "line 1" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name, reason", [("absent.jsonl", "No such file"), (".", "Is a directory")])
def test_unreadable_file_is_named(tmp_path, name, reason):
    with pytest.raises(UserError, match=reason) as error:
        list(read_json_lines(tmp_path / name))
    assert str(tmp_path) in str(error.value)
