from pathlib import Path

import pytest
from support.toy_files import make_toy_files


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the files that the default configuration names."""
    monkeypatch.chdir(tmp_path)
    make_toy_files(tmp_path)
    return tmp_path
