"""configs/README.md lists every key of the schema with its default and meaning, and nothing else."""

from support.key_tables import table_rows

from tepo_nemo.config.presets import config_folder
from tepo_nemo.config.schema import Config


def test_readme_has_a_row_for_every_key():
    key_tables = (config_folder() / "README.md").read_text().partition("## The run")[2]
    lines = key_tables.splitlines()
    written = [line for line in lines if line.startswith("| `")]
    assert written == list(table_rows(Config))


def test_readme_names_every_preset():
    text = (config_folder() / "README.md").read_text()
    for preset in config_folder().glob("*/*.yaml"):
        assert f"`{preset.stem}`" in text, preset
