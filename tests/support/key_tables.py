"""The rows that a table of keys in a README must have: key, default, meaning."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def table_rows(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """A row of Markdown for every key."""
    for name, field in schema.model_fields.items():
        nested = [
            kind
            for kind in (field.annotation, *get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        in_list = get_origin(field.annotation) is list
        if not nested or in_list:
            meaning = f"{field.description}{_choices_of(field.annotation)}"
            yield f"| `{prefix}{name}` | {_default_of(field)} | {meaning} |"
        for kind in nested:
            yield from table_rows(kind, f"{prefix}{name}.N." if in_list else f"{prefix}{name}.")


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{value if isinstance(value, Path) else json.dumps(value)}`".replace('"', "")


def _choices_of(annotation: Any) -> str:
    """The values of a Literal, alone or in a union."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Literal:
            return f" One of {', '.join(f'`{choice}`' for choice in get_args(kind))}."
    return ""
