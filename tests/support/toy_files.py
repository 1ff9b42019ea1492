"""The files that the shipped configurations name, small and without a model behind them."""

from pathlib import Path


def make_toy_files(folder: Path) -> None:
    """Make prompt sets, an empty tokenizer/ and warm_start.nemo under toy/ and chain/ in `folder`."""
    for task in ("toy", "chain"):
        (folder / task / "tokenizer").mkdir(parents=True)
        (folder / task / "warm_start.nemo").touch()
        for name in ("train", "test"):
            (folder / task / f"{name}.jsonl").write_text('{"id": "1", "prompt": "1+1=", "gold": "2"}\n')
