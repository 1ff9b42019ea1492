"""Mistakes of a configuration in one line: the key, its value, and what to do."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_WANTED = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "finite_number": "must be a finite number",
}


def first_mistake(error: ValidationError, schema: type[BaseModel]) -> str:
    """One line about the first mistake; a misspelled key comes before the key that it leaves missing."""
    mistakes = error.errors(include_url=False)
    mistake = next((each for each in mistakes if each["type"] == "extra_forbidden"), mistakes[0])
    key = ".".join(str(part) for part in mistake["loc"])
    match mistake["type"]:
        case "extra_forbidden":
            return f"{key}: unknown key{_suggestion(mistake['loc'], schema)}"
        case "missing" if isinstance(mistake["loc"][-1], int):
            return f"{key.rpartition('.')[0]}={shown(mistake['input'])}: has too few values"
        case "missing":
            return f"{key}: is missing (set {key}=...)"
        case "model_type" | "model_attributes_type":
            return f"{key}={shown(mistake['input'])}: must be a section of keys, not a single value"
        case _:
            return f"{key}={shown(mistake['input'])}: {wish(mistake)}"


def shown(value: Any) -> str:
    """A value as it is written on the command line, in one short line."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = " ".join(str(value).split())
    return text if len(text) <= 100 else text[:97] + "..."


def nearest(name: str, names: Sequence[str]) -> str:
    """`did you mean X? ` where a name is near, then all of them."""
    near = get_close_matches(name, names, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{meant}choose from {', '.join(names)}"


def wish(mistake: ErrorDetails) -> str:
    """What a value must be instead."""
    context = mistake.get("ctx", {})
    match mistake["type"]:
        case "value_error":
            return str(context["error"])
        case "literal_error":
            return f"must be one of {context['expected'].replace(' or ', ', ')}".replace("'", "")
        case "greater_than_equal":
            return f"must be at least {context['ge']:g}"
        case "greater_than":
            return f"must be greater than {context['gt']:g}"
        case "less_than_equal":
            return f"must be at most {context['le']:g}"
        case "less_than":
            return f"must be less than {context['lt']:g}"
        case other:
            return _WANTED.get(other) or mistake["msg"][0].lower() + mistake["msg"][1:]


def _suggestion(location: tuple[int | str, ...], schema: type[BaseModel]) -> str:
    """The key of this section that is nearest, or the place where a key of this name belongs."""
    *section, name = location
    here = ".".join(str(part) for part in section)
    siblings = list(_section(section, schema).model_fields)
    near = get_close_matches(str(name), siblings, n=1)
    if near:
        return f" (did you mean {here + '.' if here else ''}{near[0]}?)"
    elsewhere = [key for key in _keys(schema) if key.rpartition(".")[2] == name]
    if elsewhere:
        return f" (did you mean {elsewhere[0]}?)"
    return f" (the keys here are {', '.join(siblings)})"


def _section(location: Sequence[int | str], schema: type[BaseModel]) -> type[BaseModel]:
    """The section at a place, items of lists included."""
    for part in location:
        if isinstance(part, str):
            schema = _nested(schema.model_fields[part].annotation)
    return schema


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted name of every key outside lists, sections included."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        nested = _nested(field.annotation)
        if nested is not None and get_origin(field.annotation) is not list:
            yield from _keys(nested, f"{prefix}{name}.")


def _nested(annotation: Any) -> type[BaseModel] | None:
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
