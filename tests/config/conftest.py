from pathlib import Path

import pytest

LINE = '{"id": "1", "prompt": "1+1=", "gold": "2"}\n'


@pytest.fixture(autouse=True)
def toy_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the default configuration names, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy" / "tokenizer").mkdir(parents=True)
    for name in ("train", "test"):
        (tmp_path / "toy" / f"{name}.jsonl").write_text(LINE)
    return tmp_path / "toy"
