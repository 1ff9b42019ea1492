"""configs/README.md lists every key of the schema with its default and meaning, and nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tepo_nemo.config.presets import config_folder
from tepo_nemo.config.schema import Config


def table_rows(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        nested = [
            kind
            for kind in (field.annotation, *get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        in_list = get_origin(field.annotation) is list
        if not nested or in_list:
            meaning = f"{field.description}{choices_of(field.annotation)}"
            yield f"| `{prefix}{name}` | {default_of(field)} | {meaning} |"
        for kind in nested:
            yield from table_rows(kind, f"{prefix}{name}.N." if in_list else f"{prefix}{name}.")


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{value if isinstance(value, Path) else json.dumps(value)}`".replace('"', "")


def choices_of(annotation: Any) -> str:
    """The values of a Literal, alone or in a union."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Literal:
            return f" One of {', '.join(f'`{choice}`' for choice in get_args(kind))}."
    return ""


def test_readme_has_a_row_for_every_key():
    key_tables = (config_folder() / "README.md").read_text().partition("## The run")[2]
    lines = key_tables.splitlines()
    written = [line for line in lines if line.startswith("| `")]
    assert written == list(table_rows(Config))


def test_readme_names_every_preset():
    text = (config_folder() / "README.md").read_text()
    for preset in config_folder().glob("*/*.yaml"):
        assert f"`{preset.stem}`" in text, preset
