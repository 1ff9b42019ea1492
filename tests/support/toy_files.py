"""The files that the default configuration names, small and without a model behind them."""

from pathlib import Path


def make_toy_files(folder: Path) -> None:
    """Make toy/train.jsonl, toy/test.jsonl, empty toy/tokenizer/ and toy/warm_start.nemo in `folder`."""
    (folder / "toy" / "tokenizer").mkdir(parents=True)
    (folder / "toy" / "warm_start.nemo").touch()
    for name in ("train", "test"):
        (folder / "toy" / f"{name}.jsonl").write_text('{"id": "1", "prompt": "1+1=", "gold": "2"}\n')
