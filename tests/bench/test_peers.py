"""Functions of packages that are not imported."""

import sys
from types import SimpleNamespace

import pytest

from tepo_nemo.bench import peers


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of peers with a package whose import fails."""
    package = tmp_path / "trl"
    (package / "trainer").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "trainer/utils.py").write_text(
        "import no_such_package\n"
        "def double(value):\n    return helper(value) * times\n"
        "def helper(value):\n    return value + 1\n"
        "class Other:\n    def half(self, value):\n        return value / self.parts\n"
    )
    (package / "alone.py").write_text("VALUE = 3\n")
    (tmp_path / "trl-9.8.dist-info").mkdir()
    (tmp_path / "trl-9.8.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 9.8\n")
    monkeypatch.setenv(peers.FOLDER_VARIABLE, str(tmp_path))
    return package


def test_functions_are_taken_out_of_a_file_that_cannot_be_imported(folder):
    assert peers.folder_of("trl") == folder
    assert peers.version_of("trl") == "9.8"
    module = peers.load_functions(folder / "trainer/utils.py", ["double", "helper"], {"times": 10})
    assert module.double(2) == 30
    assert "trl" not in sys.modules


def test_so_is_a_method_whose_class_cannot_be_built(folder):
    module = peers.load_functions(folder / "trainer/utils.py", ["Other.half"], {})
    assert module.half(SimpleNamespace(parts=2), 6) == 3


def test_a_file_is_loaded_without_its_package(folder):
    module = peers.load_file(folder / "alone.py", "tepo_nemo_test_alone")
    assert module.VALUE == 3
    assert peers.load_file(folder / "alone.py", "tepo_nemo_test_alone") is module
    assert "trl" not in sys.modules


def test_what_is_missing_is_said(folder, monkeypatch):
    with pytest.raises(peers.Absent, match="has no triple"):
        peers.load_functions(folder / "trainer/utils.py", ["double", "triple"], {})
    with pytest.raises(peers.Absent, match="has no nowhere.py"):
        peers.load_file(folder / "nowhere.py", "tepo_nemo_test_nowhere")
    monkeypatch.setenv(peers.FOLDER_VARIABLE, str(folder / "empty"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(peers.Absent, match=r"not installed \(pip install --no-deps verl==0\.9\.1\)"):
        peers.folder_of("verl")
