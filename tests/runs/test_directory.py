import os
from pathlib import Path

import pytest

from tepo_nemo.errors import UserError
from tepo_nemo.runs.directory import RunDirectory


def test_create_makes_the_layout_that_scripts_rely_on(tmp_path):
    run = RunDirectory.create(tmp_path / "deep" / "run", "seed: 1\n")
    root = tmp_path / "deep" / "run"
    assert sorted(os.listdir(root)) == [
        "checkpoints",
        "config.yaml",
        "logs",
        "plots",
        "samples",
        "tensorboard",
    ]
    assert run.config == root / "config.yaml" and run.config.read_text() == "seed: 1\n"
    assert run.metrics == root / "metrics.jsonl"
    assert run.summary == root / "summary.json"
    assert run.checkpoints == root / "checkpoints"
    assert run.plots == root / "plots"
    assert run.logs == root / "logs"
    assert run.samples(3).parent == root / "samples"
    assert run == RunDirectory(root)


def test_sample_files_sort_as_their_steps():
    steps = [1, 2, 9, 10, 72, 100, 9999, 10_000, 123_456]
    names = [RunDirectory(Path("run")).samples(step) for step in steps]
    assert names == sorted(names, key=str) and len(set(names)) == len(steps)
    assert all(name.match("samples/step_*.jsonl") for name in names)


def test_create_fills_an_empty_folder_in_place(tmp_path):
    (tmp_path / "run").mkdir()
    inode = (tmp_path / "run").stat().st_ino  # a mount point cannot be replaced
    RunDirectory.create(tmp_path / "run", "")
    assert (tmp_path / "run").stat().st_ino == inode


def test_create_refuses_a_folder_that_is_not_empty(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="not empty; choose another one"):
        RunDirectory.create(tmp_path, "seed: 1\n")
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("name, reason", [("file", "is a file"), ("file/run", "cannot be written")])
def test_create_refuses_a_path_that_no_folder_can_have(tmp_path, name, reason):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=reason) as error:
        RunDirectory.create(tmp_path / name, "")
    assert name in str(error.value)


def test_two_runs_never_share_a_folder(tmp_path):
    RunDirectory.create(tmp_path / "run", "seed: 1\n")
    with pytest.raises(UserError, match="not empty"):
        RunDirectory.create(tmp_path / "run", "seed: 2\n")
    assert (tmp_path / "run" / "config.yaml").read_text() == "seed: 1\n"


def test_a_run_exists_from_its_configuration_on(tmp_path):
    run = RunDirectory(tmp_path / "run")
    assert not run.exists
    RunDirectory.create(run.path, "seed: 1\n")
    assert run.exists


def test_a_run_that_goes_on_has_the_configuration_of_now_and_all_else(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "seed: 1\n")
    run.metrics.write_text("{}")
    run.plots.rmdir()
    RunDirectory.reopen(run.path, "seed: 1\nlayout: 2\n")
    assert run.config.read_text() == "seed: 1\nlayout: 2\n"
    assert run.metrics.read_text() == "{}" and run.plots.is_dir()


@pytest.mark.parametrize(
    ("left", "taken"),
    [
        (["samples/", "logs/"], True),
        ([".config.yaml.7.partial"], True),
        (["mine/"], False),
        (["logs/x"], False),
    ],
)
def test_what_a_killed_process_left_of_a_new_run_is_no_obstacle(tmp_path, left, taken):
    for name in left:
        path = tmp_path / "run" / name
        path.mkdir(parents=True) if name.endswith("/") else path.parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    if taken:
        assert RunDirectory.create(tmp_path / "run", "seed: 1\n").exists
    else:
        with pytest.raises(UserError, match="not empty"):
            RunDirectory.create(tmp_path / "run", "seed: 1\n")


def test_samples_of_later_steps_are_dropped(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "")
    for step in (1, 2, 3, 1000000):
        run.samples(step).touch()
    (run.samples_folder / "step_mine.jsonl").touch()
    run.drop_samples(2)
    assert sorted(os.listdir(run.samples_folder)) == [
        "step_000001.jsonl",
        "step_000002.jsonl",
        "step_mine.jsonl",
    ]
