"""Checkpoints as folders: complete or absent, checked before use, kept while they are needed."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from tepo_nemo.runs.checkpoints import (
    CheckpointFolder,
    FileRecord,
    Manifest,
    Position,
    Unusable,
    check_files,
    check_hashes,
    read_manifest,
    share_of,
)

CONTENT = {"model_weights/__0_0.distcp": b"weights", "state.json": b"{}"}


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    (tmp_path / "checkpoints").mkdir()
    return CheckpointFolder(tmp_path / "checkpoints")


def write(folder: CheckpointFolder, position: Position) -> tuple[Path, Manifest]:
    """A hidden folder with everything but the manifest, which is returned."""
    partial = folder.partial(position)
    for name, content in CONTENT.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(content)
    files = {name: FileRecord(len(data), sha256(data).hexdigest()) for name, data in CONTENT.items()}
    return partial, Manifest(position.step, position.updates, "of the config", None, files)


def save(folder: CheckpointFolder, step: int, updates: int = 0, score: float | None = None) -> Path:
    partial, manifest = write(folder, Position(step, updates))
    folder.commit(partial, Manifest(step, updates, "of the config", score, manifest.files))
    return folder.of(Position(step, updates))


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(entry.name for entry in folder.path.iterdir())


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("step_000010", Position(10)),
        ("step_000010_update_003", Position(10, 3)),
        ("step_1234567", Position(1234567)),
        ("step_10", None),
        (".step_000010.ab12cd34.partial", None),
        ("step_000010.nemo", None),
        ("latest", None),
    ],
)
def test_names_say_where_in_the_run(name: str, position: Position | None) -> None:
    assert Position.of(name) == position
    assert position is None or position.name == name


def test_positions_are_in_the_order_of_the_run() -> None:
    ordered = [Position(9), Position(10), Position(10, 1), Position(10, 2), Position(11)]
    assert sorted(reversed(ordered)) == ordered


def test_a_commit_gives_the_name_and_the_link(folder: CheckpointFolder) -> None:
    partial, manifest = write(folder, Position(3))
    assert folder.positions() == [] and folder.complete() == {}
    folder.commit(partial, manifest)
    assert names(folder) == ["latest", "step_000003"]
    assert folder.latest.readlink() == Path("step_000003")  # relative: the run may be moved
    assert read_manifest(folder.latest) == manifest
    check_files(folder.latest, manifest)
    check_hashes(folder.latest, manifest, list(manifest.files))
    save(folder, 3, updates=1)
    assert folder.latest.readlink() == Path("step_000003_update_001")


def test_a_checkpoint_is_replaced_as_a_whole(folder: CheckpointFolder) -> None:
    (save(folder, 3) / "state.json").write_bytes(b"broken")
    save(folder, 3)
    assert names(folder) == ["latest", "step_000003"]
    assert list(folder.complete()) == [Position(3)]


def test_a_link_that_was_copied_as_a_folder_is_no_obstacle(folder: CheckpointFolder) -> None:
    save(folder, 3)
    folder.latest.unlink()
    shutil.copytree(folder.of(Position(3)), folder.latest)
    save(folder, 4)
    assert folder.latest.is_symlink() and folder.latest.readlink() == Path("step_000004")


def spoil(path: Path, how: str) -> None:
    weights = path / "model_weights/__0_0.distcp"
    match how:
        case "a shard is missing":
            weights.unlink()
        case "a shard was cut":
            weights.write_bytes(b"weight")
        case "a byte was flipped":
            weights.write_bytes(b"weighty"[:6] + b"z")
        case "no manifest":
            (path / "manifest.json").unlink()
        case "half a manifest":
            (path / "manifest.json").write_text('{"step": 3, "up')
        case "a manifest of something else":
            (path / "manifest.json").write_text('{"files": {}}')
        case "a later format":
            fields = json.loads((path / "manifest.json").read_text())
            (path / "manifest.json").write_text(json.dumps(fields | {"format": 99}))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("a shard is missing", "model_weights/__0_0.distcp is missing"),
        ("a shard was cut", "model_weights/__0_0.distcp has 6 bytes, and 7 were written"),
        ("a byte was flipped", "model_weights/__0_0.distcp is not what was written"),
        ("no manifest", "it has no manifest.json"),
        ("half a manifest", "its manifest.json is broken"),
        ("a manifest of something else", "its manifest.json is broken"),
        ("a later format", "its format is 99, and this version reads 1"),
    ],
)
def test_a_spoilt_checkpoint_says_why(folder: CheckpointFolder, how: str, reason: str) -> None:
    path = save(folder, 3)
    spoil(path, how)
    with pytest.raises(Unusable) as unusable:
        manifest = read_manifest(path)
        check_files(path, manifest)
        check_hashes(path, manifest, list(manifest.files))
    assert str(unusable.value) == reason
    assert bool(folder.complete()) == (how == "a byte was flipped")  # to see that takes reading


def test_ranks_share_the_reading(folder: CheckpointFolder) -> None:
    sizes = {"a": 50, "b": 40, "c": 30, "d": 20, "e": 10, "f": 0}
    manifest = Manifest(1, 0, "", None, {name: FileRecord(size, "") for name, size in sizes.items()})
    shares = [share_of(manifest, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    assert [sum(sizes[name] for name in share) for share in shares] == [50, 50, 50]
    assert share_of(manifest, 0, 1) and share_of(manifest, 7, 8) == []


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [
        (1, 0, [5]),
        (2, 0, [4, 5]),
        (100, 0, [1, 2, 3, 4, 5]),
        (1, 1, [2, 5]),
        (1, 2, [2, 4, 5]),  # of equals the newer
        (2, 3, [1, 2, 4, 5]),
    ],
)
def test_the_last_and_the_best_are_kept(
    folder: CheckpointFolder, keep_last: int, keep_best: int, kept: list[int]
) -> None:
    for step, score in [(1, 0.6), (2, 0.9), (3, None), (4, 0.6), (5, 0.1)]:
        save(folder, step, score=score)
    folder.retain(Position(5), keep_last=keep_last, keep_best=keep_best)
    assert sorted(position.step for position in folder.positions()) == kept
    assert not [name for name in names(folder) if name.startswith(".")]


def test_a_broken_one_never_takes_the_place_of_a_good_one(folder: CheckpointFolder) -> None:
    for step in (1, 2, 3):
        save(folder, step)
    spoil(folder.of(Position(2)), "a shard is missing")
    folder.retain(Position(3), keep_last=2, keep_best=0)
    assert sorted(position.step for position in folder.positions()) == [1, 2, 3]


def test_what_a_resumed_run_has_gone_back_behind_is_left_until_it_is_replaced(
    folder: CheckpointFolder,
) -> None:
    for step in (1, 2, 9):
        save(folder, step)
    folder.retain(Position(2), keep_last=1, keep_best=0)
    assert sorted(position.step for position in folder.positions()) == [2, 9]


def test_what_a_run_has_turned_away_from_is_forgotten(folder: CheckpointFolder) -> None:
    for position in (Position(2), Position(3), Position(3, 2), Position(4)):
        save(folder, *position)
    folder.forget_after(Position(3))
    assert names(folder) == ["latest", "step_000002", "step_000003"]


@pytest.mark.parametrize("moment", ["written", "renamed away", "replaced", "deleting", "linking"])
def test_what_a_killed_save_leaves_is_cleaned_and_nothing_is_lost(
    folder: CheckpointFolder, moment: str
) -> None:
    save(folder, 3)
    partial, manifest = write(folder, Position(3))
    match moment:
        case "renamed away":
            folder.of(Position(3)).rename(partial.with_suffix(".replaced"))
        case "replaced":
            folder.of(Position(3)).rename(partial.with_suffix(".replaced"))
            (partial / "manifest.json").write_text(manifest.to_json())
            partial.rename(folder.of(Position(3)))
        case "deleting":
            save(folder, 4)
            (partial / "state.json").unlink()
        case "linking":
            (folder.path / ".latest.12345678.partial").symlink_to("step_000003")
    folder.clean()
    assert not [name for name in names(folder) if name.startswith(".")]
    assert Position(3) in folder.complete()
    assert folder.latest.resolve().is_dir()
