"""From a row of a published file to a problem: its text, its gold, its id, or the reason why not."""

import re
from dataclasses import dataclass
from hashlib import sha256

from tepo_nemo.data.boxed import last_box
from tepo_nemo.data.prompts import text_fault
from tepo_nemo.data.sources import Source

PROBLEM_COLUMNS = ("problem", "question", "prompt", "Problem")
GOLD_COLUMNS = ("reward_model", "answer", "final_answer", "gold", "Answer", "solution")

# What publishers have put around their problems: how to answer is for the template to say.
_FRAMES = (
    re.compile(
        r"Solve the following math problem step by step\. The last line of your response should be of the "
        r"form Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s+"
    ),
    re.compile(r"\s+Remember to put your answer on its own line after \"Answer:\"\.\s*$"),
    re.compile(r"\s+Let's think step by step and output the final answer within \\boxed\{\}\.\s*$"),
    re.compile(
        r"\s*让我们一步一步地思考。请以“Answer: \\boxed\{<final_answer>\}”的格式输出最终答案。.*$", re.S
    ),
)
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)(?:\.0*)?(?:\^\{?\\circ\}?)?")  # 025, 142.0, 336^\circ


class Malformed(Exception):
    """Why a row is no problem."""


@dataclass(frozen=True)
class Problem:
    """One problem as its source has it, before a template is put around it."""

    id: str
    text: str
    gold: str
    metadata: dict


def to_problem(fields: dict, number: int, source: Source) -> Problem:
    """The problem of a row.

    Args:
        fields: verl's columns (`prompt` a list of messages, `reward_model.ground_truth`), or one of
            `PROBLEM_COLUMNS` and one of `GOLD_COLUMNS`; further fields may stand in `meta` or `metadata`.
        number: of the row, from 1.

    Raises:
        Malformed: a column is missing, empty, or of a form that the source does not have.
    """
    text = _unframed(_problem_text(fields))
    gold = _gold(fields)
    if source.answer_form == "integer":
        gold = _canonical_integer(gold)
    section = _section(fields, "metadata") | _section(fields, "meta")
    further = section | fields
    metadata = {
        "source": source.name,
        "licence": source.licence,
        "answer_form": source.answer_form,
        **(section if source.keeps_metadata else {}),
        "problem": text,
        **{name: further[column] for column, name in source.kept.items() if column in further},
    }
    return Problem(_id(fields, text, number, source), text, gold, metadata)


def one_spaced(text: str) -> str:
    """The text with every run of white space made one space: what makes two problems the same."""
    return " ".join(text.split())


def _problem_text(fields: dict) -> str:
    column, value = _first(fields, PROBLEM_COLUMNS)
    if isinstance(value, list):  # messages of a chat
        users = [message for message in value if isinstance(message, dict) and message.get("role") == "user"]
        if len(users) != 1:
            raise Malformed(f"{column!r} has {len(users)} messages of a user where one is needed")
        value = users[0].get("content")
    return _text(column, value)


def _gold(fields: dict) -> str:
    column, value = _first(fields, GOLD_COLUMNS)
    if column == "reward_model":
        value = value.get("ground_truth") if isinstance(value, dict) else None
    if isinstance(value, list):
        if len(value) != 1:
            raise Malformed(f"{column!r} has {len(value)} answers where one is needed")
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    value = _text(column, value)
    if column == "solution":  # a worked one, or the answer alone
        boxed = last_box(value)
        if boxed is None and "\\boxed" in value:
            raise Malformed("the last box of 'solution' is never closed")
        if boxed is not None:
            value = _text(column, boxed)
    return value.strip()


def _section(fields: dict, column: str) -> dict:
    value = fields.get(column)
    return value if isinstance(value, dict) else {}


def _first(fields: dict, columns: tuple[str, ...]) -> tuple[str, object]:
    for column in columns:
        if fields.get(column) is not None:
            return column, fields[column]
    raise Malformed(
        f"has none of the columns {', '.join(columns)} (its columns: {', '.join(map(str, fields)) or 'none'})"
    )


def _text(column: str, value: object) -> str:
    fault = text_fault(value)
    if fault is not None:
        raise Malformed(f"{column!r} {fault}")
    return value


def _unframed(text: str) -> str:
    for frame in _FRAMES:
        text = frame.sub("", text)
    return text.strip()


def _canonical_integer(gold: str) -> str:
    match = _INTEGER.fullmatch(gold.strip())
    if match is None:
        raise Malformed(f"the gold {gold!r:.80} is not an integer")
    sign, digits = match[1], match[2]
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def _id(fields: dict, text: str, number: int, source: Source) -> str:
    if source.id_from_text:
        return f"{source.name}-{sha256(one_spaced(text).encode()).hexdigest()[:12]}"
    if source.id_field is None:
        return f"{source.name}-{number - 1:04d}"
    value = fields.get(source.id_field)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return _text(source.id_field, value)
