"""What may happen to checkpoints on a disk: the good one is used, and one line says why another is not."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree

import pytest
from support.resume_runs import Ended, Fault, StopAt, resume_config, run_here, told, written
from support.toy import ToyFolder
from support.worlds import Worlds

from tepo_nemo.errors import UserError
from tepo_nemo.runs.checkpoints import CheckpointFolder
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import read_metrics

pytestmark = pytest.mark.timeout(300)

STATIC = "algorithm.dynamic_sampling=false"
WEIGHTS = "model_weights/__0_0.distcp"

Train = Callable[..., list[Ended]]


@pytest.fixture
def train(worlds: Worlds, toy: ToyFolder) -> Train:
    """`train(output, *overrides, fault=..., **layout)`."""

    def start(
        output: Path,
        *overrides: str,
        stop_at: StopAt | None = None,
        fault: Fault | None = None,
        **layout: int,
    ) -> list[Ended]:
        config = resume_config(toy, output, STATIC, *overrides, **layout)
        return worlds(config.layout.world, stack="nemo").run(run_here, config, stop_at, fault, timeout=110)

    return start


@pytest.fixture(scope="module")
def in_one(worlds: Worlds, toy: ToyFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that nothing has disturbed."""
    output = tmp_path_factory.mktemp("in_one") / "run"
    config = resume_config(toy, output, STATIC, "trainer.max_steps=4")
    worlds(1, stack="nemo").run(run_here, config, timeout=110)
    return output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose checkpoints/ is a file system of its own, of 4 MiB."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    if os.geteuid() != 0 or _mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)):
        pytest.skip("to mount a small file system takes the rights of an administrator")
    yield folder.parent
    subprocess.run(["umount", str(folder)], check=True)


def _mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], stderr=subprocess.DEVNULL).returncode


def steps(output: Path) -> list[int]:
    """Of the complete checkpoints that were taken between two steps."""
    complete = CheckpointFolder(RunDirectory(output).checkpoints).complete()
    return sorted(position.step for position in complete if not position.updates)


def assert_same(output: Path, in_one: Path, without: str = "checkpoint/failed_saves") -> None:
    """To the bit, but for the count of what could not be saved."""

    def rows(path: Path) -> list[str]:
        return [str({k: v for k, v in json.loads(line).items() if not k.startswith(("time/", without))})
                for line in RunDirectory(path).metrics.read_text().splitlines()]  # fmt: skip

    assert rows(output) == rows(in_one)
    assert written(output) == written(in_one)


@pytest.mark.parametrize("unaware", [False, True], ids=["foreseen", "too late"])
def test_a_full_disk(train: Train, small_disk: Path, in_one: Path, unaware: bool) -> None:
    """A checkpoint takes 1.1 MiB; training goes on without, and the run fails where the last one does."""
    with pytest.raises(RuntimeError, match="checkpoint step_000005 could not be written: ") as failure:
        train(small_disk, fault=Fault(unaware=unaware))
    assert ("No space left on device" if unaware else "GiB are needed") in str(failure.value)
    kept = steps(small_disk)
    assert kept == ([1, 2, 3] if unaware else [1, 2])
    assert not list((small_disk / "checkpoints").glob(".*")), "what could not be completed takes no room"
    failed = [row["checkpoint/failed_saves"] for row in read_metrics(RunDirectory(small_disk).metrics)]
    assert failed == ([0, 0, 0, 0, 1] if unaware else [0, 0, 0, 1, 2])
    subprocess.run(["mount", "-o", "remount,size=32m", str(small_disk / "checkpoints")], check=True)
    (ended,) = train(small_disk, "trainer.max_steps=4")
    assert f"goes on from checkpoints/step_00000{kept[-1]}" in ended.console
    assert_same(small_disk, in_one)


def test_a_folder_that_cannot_be_written(train: Train, small_disk: Path, in_one: Path) -> None:
    folder = str(small_disk / "checkpoints")
    train(small_disk, "trainer.max_steps=2", "trainer.keep_last=1")
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    with pytest.raises(RuntimeError, match="step_000004 could not be written: .*: Read-only file system"):
        train(small_disk, "trainer.max_steps=4")
    assert steps(small_disk) == [2]
    subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
    train(small_disk, "trainer.max_steps=4", "trainer.keep_last=1")
    assert_same(small_disk, in_one)


@pytest.mark.parametrize("background", [False, True], ids=["in place", "in the background"])
def test_a_rank_that_cannot_write_fails_the_save_on_all(
    train: Train, tmp_path: Path, background: bool
) -> None:
    layout = dict(tensor=2)
    changes = ("trainer.max_steps=2", f"trainer.async_save={str(background).lower()}")
    train(tmp_path / "run", *changes, stop_at=StopAt("update", 4), **layout)
    good = steps(tmp_path / "run")
    with pytest.raises(RuntimeError, match=r"could not be written: Input/output error \(rank 1\)"):
        train(tmp_path / "run", *changes, fault=Fault(failing_rank=1), **layout)
    assert steps(tmp_path / "run") == good == [1]
    train(tmp_path / "run", *changes, **layout)
    assert steps(tmp_path / "run") == [1, 2]


def spoil(checkpoint: Path, how: str) -> None:
    match how:
        case "missing shard":
            (checkpoint / WEIGHTS).unlink()
        case "flipped byte":
            content = bytearray((checkpoint / WEIGHTS).read_bytes())
            content[len(content) // 2] ^= 1
            (checkpoint / WEIGHTS).write_bytes(content)
        case "no manifest":
            (checkpoint / "manifest.json").unlink()


REASONS = {
    "missing shard": f"{WEIGHTS} is missing",
    "flipped byte": f"{WEIGHTS} is not what was written",
    "no manifest": "it has no manifest.json",
}


@pytest.mark.parametrize("how", REASONS)
def test_a_spoilt_checkpoint_is_passed_over(train: Train, tmp_path: Path, in_one: Path, how: str) -> None:
    output = tmp_path / "run"
    copytree(in_one, output, symlinks=True)
    spoil(output / "checkpoints/step_000004", how)
    (output / "checkpoints/.step_000004.0123abcd.partial").mkdir()
    (ended,) = train(output, "trainer.max_steps=4")
    lines = ended.console.splitlines()
    assert lines[:2] == [
        f"checkpoint step_000004 is passed over: {REASONS[how]}",
        "goes on from checkpoints/step_000003",
    ]
    assert_same(output, in_one)
    assert steps(output) == [1, 2, 3, 4]
    assert not list((output / "checkpoints").glob(".*"))


def test_a_run_whose_checkpoints_are_all_spoilt_does_not_begin_again(
    train: Train, tmp_path: Path, in_one: Path
) -> None:
    output = tmp_path / "run"
    copytree(in_one, output, symlinks=True)
    for step in (1, 2, 3, 4):
        spoil(output / f"checkpoints/step_{step:06d}", "flipped byte")
    before = told(output)
    with pytest.raises(UserError) as mistake:
        train(output, "trainer.max_steps=4")
    assert str(mistake.value).startswith(
        f"output={output}: no checkpoint of the run can be used; checkpoint step_000004 is passed over: "
        f"{WEIGHTS} is not what was written; checkpoint step_000003"
    )
    assert told(output) == before


@pytest.mark.parametrize("change", ["model.num_layers=1", "trainer.optimizer.learning_rate=0.002"])
def test_a_checkpoint_of_another_model_or_configuration_is_passed_over(
    train: Train, tmp_path: Path, in_one: Path, change: str
) -> None:
    train(tmp_path / "other", "trainer.max_steps=1", change)
    output = tmp_path / "run"
    copytree(in_one, output, symlinks=True)
    copytree(tmp_path / "other/checkpoints/step_000001", output / "checkpoints/step_000009")
    (ended,) = train(output, "trainer.max_steps=5")
    assert ended.console.splitlines()[:2] == [
        "checkpoint step_000009 is passed over: it is of another model or configuration",
        "goes on from checkpoints/step_000004",
    ]


def test_other_prompts_under_the_same_name_are_refused(
    train: Train, tmp_path: Path, in_one: Path, toy: ToyFolder
) -> None:
    output = tmp_path / "run"
    copytree(in_one, output, symlinks=True)
    prompts = toy.path / "resume.jsonl"
    content = prompts.read_text()
    prompts.write_text(content.replace('"gold": "7"', '"gold": "8"'))
    try:
        with pytest.raises(UserError, match="data.train=.*: is not what it was when the run began"):
            train(output, "trainer.max_steps=5")
    finally:
        prompts.write_text(content)
