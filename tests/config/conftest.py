from pathlib import Path

import pytest
from support.toy_files import make_math_files, make_model_files, make_toy_files


@pytest.fixture(autouse=True)
def toy_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with the files that the default configuration names."""
    monkeypatch.chdir(tmp_path)
    make_toy_files(tmp_path)
    make_math_files(tmp_path)
    make_model_files(tmp_path)
