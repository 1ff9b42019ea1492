"""A prompt set: a JSON-lines file with `id`, `prompt`, `gold` and, optionally, `metadata`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import read_json_lines, to_json

_TEXT_FIELDS = ("id", "prompt", "gold")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Prompt:
    """One problem: the text that the model sees, and the answer that its response is graded against."""

    id: str
    prompt: str
    gold: str
    metadata: dict = field(default_factory=dict)


def load_prompts(path: Path) -> list[Prompt]:
    """Reads a prompt set in the order of its lines.

    Raises:
        UserError: the file is missing, empty or not UTF-8; a line is not a JSON object, has an unknown or
            a missing field, an empty one, one that is no string, or the id of an earlier line. Names the
            file and the line.
    """
    prompts: list[Prompt] = []
    first_line: dict[str, int] = {}
    for number, fields in read_json_lines(path):
        prompt = _to_prompt(fields, f"{path}:{number}")
        if prompt.id in first_line:
            earlier = first_line[prompt.id]
            raise UserError(f"{path}:{number}: id {prompt.id!r} is that of line {earlier}; give each its own")
        first_line[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path}: has no prompts; write one JSON object a line")
    return prompts


def _to_prompt(fields: dict, place: str) -> Prompt:
    for name in _TEXT_FIELDS:
        if name not in fields:
            raise UserError(f"{place}: has no field {name!r}; every line needs {', '.join(_TEXT_FIELDS)}")
        _check_text(name, fields[name], place)
    if not isinstance(fields.get("metadata", {}), dict):
        raise UserError(f"{place}: 'metadata' is {fields['metadata']!r}; it must be a JSON object")
    unknown = sorted(fields.keys() - {*_TEXT_FIELDS, "metadata"})
    if unknown:
        raise UserError(f"{place}: has the unknown field {unknown[0]!r}; put further fields into 'metadata'")
    return Prompt(**fields)


def _check_text(name: str, value: object, place: str) -> None:
    fault = text_fault(value)
    if fault is not None:
        raise UserError(f"{place}: {name!r} {fault}")


def text_fault(value: object) -> str | None:
    """What keeps a value from being a text of a prompt set, and what to do; None for a good one."""
    if not isinstance(value, str) or not value.strip():
        return f"is {value!r:.80}; it must be a string that is not empty"
    if _SURROGATE.search(value):
        return "holds a lone surrogate; repair the text, no tokenizer takes it"
    return None


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """SHA-256 of ids, prompts and golds in their order: two sets that share it ask and expect the same."""
    digest = sha256()
    for prompt in prompts:
        digest.update(to_json({"id": prompt.id, "prompt": prompt.prompt, "gold": prompt.gold}).encode())
        digest.update(b"\n")
    return digest.hexdigest()
