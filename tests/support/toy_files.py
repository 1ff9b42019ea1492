"""The files that the shipped configurations name, small and without a model behind them."""

import io
import tarfile
from pathlib import Path

from tepo_nemo.config.presets import config_folder

PROBLEM = '{"id": "1", "prompt": "1+1=", "gold": "2"}\n'


def make_toy_files(folder: Path) -> None:
    """Make prompt sets, an empty tokenizer/ and a warm_start.nemo under toy/ and chain/ in `folder`."""
    for task in ("toy", "chain"):
        (folder / task / "tokenizer").mkdir(parents=True)
        make_archive(folder / task / "warm_start.nemo")
        for name in ("train", "test"):
            (folder / task / f"{name}.jsonl").write_text(PROBLEM)


def make_math_files(folder: Path) -> None:
    """Make the prompt sets of data=math, one problem each, in `folder`/math."""
    (folder / "math").mkdir()
    for name in (
        "dapo_math_17k", "aime24", "aime25", "amc", "math500", "omni_math", "olympiadbench", "minerva"
    ):  # fmt: skip
        (folder / "math" / f"{name}.jsonl").write_text(PROBLEM)


def make_model_files(folder: Path) -> None:
    """Make the checkpoints of the shipped models, empty folders, in `folder`/models."""
    for path in (config_folder() / "model").glob("*.yaml"):
        (folder / "models" / path.stem).mkdir(parents=True)


def make_archive(path: Path, name: str = "model_config.yaml") -> None:
    """Make a `.nemo` that holds a file of that name, which says nothing, and no weights."""
    content = b"name: none\n"
    member = tarfile.TarInfo(f"./{name}")
    member.size = len(content)
    with tarfile.open(path, "w:") as archive:
        archive.addfile(member, io.BytesIO(content))
