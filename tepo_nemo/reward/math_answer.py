"""Reward 1 for a response whose last box holds the right answer."""

import itertools
import re
from fractions import Fraction
from functools import lru_cache

from tepo_nemo.data.boxed import last_box
from tepo_nemo.errors import UserError
from tepo_nemo.reward.equality import equal
from tepo_nemo.reward.exact_number import Number, read_number
from tepo_nemo.reward.latex import clean, squeezed
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.reward.structure import Named, Single, parse
from tepo_nemo.reward.units import split_unit

FORMS = ("expression", "integer", "numeric", "choice")
_LONGEST = 5000  # characters of an answer, and
_DEEPEST = 30  # brackets in brackets; beyond both nobody means it as an answer
_RELATIVE = Fraction(1, 100)  # how far a rounded gold may be from the answer that it was rounded from


def math_answer(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """Compares the last box of a response with the gold answer; the README of this folder has the rules.

    `metadata` may say more of the gold (each is optional):
        answer_form: `expression` (the default), `integer` (exact integers alone), `numeric` (a gold with a
            decimal point or an exponent is a rounded one), `choice` (a letter).
        is_multiple_answer: true where commas of the gold stand between answers and never mark thousands.
        unit: the unit of the gold, which a response may give or leave out.
        error: how far a numeric answer may be off, absolutely.

    Raises:
        UserError: `answer_form` is none of these.
    """
    answer = last_box(response_text)
    if answer is None:
        return RewardResult(0.0, "unparseable")
    return grade_answer(gold, answer, metadata)


def grade_final_answer(prompt: str, answer: str, gold: str, metadata: dict) -> RewardResult:
    """As `math_answer`, for an answer without a box."""
    return grade_answer(gold, answer, metadata)


def grade_answer(gold: str, answer: str, metadata: dict) -> RewardResult:
    """The verdict on what stands in a box."""
    form = metadata.get("answer_form", "expression")
    if form not in FORMS:
        raise UserError(f"answer_form={form!r} of gold {gold!r} is not one of {', '.join(FORMS)}")
    shown = answer.strip()[:_LONGEST]
    if len(answer) > _LONGEST or _depth(answer) > _DEEPEST:
        return RewardResult(0.0, "unparseable", shown)
    written = clean(answer)
    if not written:
        return RewardResult(0.0, "unparseable", shown)
    if form == "integer":
        return _integer(gold, written, shown)
    return RewardResult(float(_right(gold, written, form, metadata)), "ok", shown)


def _depth(answer: str) -> int:
    opened = itertools.accumulate((c in "([{") - (c in ")]}") for c in answer)
    return max(opened, default=0)


def _integer(gold: str, written: str, shown: str) -> RewardResult:
    expected, found = _read_integer(clean(gold)), _read_integer(written)
    if expected is None:
        raise UserError(f"gold {gold!r} is not an integer; repair it or its answer_form")
    if found is None:
        return RewardResult(0.0, "unparseable", shown)
    return RewardResult(float(expected == found), "ok", shown)


def _read_integer(written: str) -> str | None:
    """Digits without zeros in front; a name before them and a unit behind them are left out."""
    text = squeezed(split_unit(re.sub(r"^[^=]*=", "", written))[0])
    text = re.sub(r"(?<=\d),(?=\d{3}(?:,|$))", "", text)
    match = re.fullmatch(r"([+-]?)0*(\d+?)(?:\.0*)?", text)
    if match is None:
        return None
    return match[2] if match[1] != "-" or match[2] == "0" else "-" + match[2]


def _right(gold: str, written: str, form: str, metadata: dict) -> bool:
    if squeezed(clean(gold)) == squeezed(written):
        return True
    if len(alternatives := gold.split(" OR ")) > 1:
        return any(_right(alternative, written, form, metadata) for alternative in alternatives)
    gold = last_box(gold) or gold  # a sentence around its answer
    if form == "choice" or re.fullmatch(r"\\text\{\s*\([A-J]\)\s*\}", gold.strip()):
        return _choice(clean(gold)) == _choice(written) is not None
    several = bool(metadata.get("is_multiple_answer", False))
    structure = _parsed(gold, several)
    answer = parse(written, several)
    unit = str(metadata.get("unit") or "").strip("$ ")
    if isinstance(structure, Single) and unit in ("%", "\\%"):  # a percent sign may be left out here
        golds = [structure, Single(f"{structure.text}%")]
    elif isinstance(structure, Single) and unit:
        golds = [Single(clean(f"{gold}{unit}" if unit.startswith("^") else rf"{gold} \text{{{unit}}}"))]
    else:
        golds = [structure]
    if any(equal(right, answer) for right in golds):
        return True
    if form == "numeric" or metadata.get("error") is not None:
        return any(_near(right, answer, form, metadata) for right in golds)
    return False


@lru_cache(maxsize=4096)
def _parsed(gold: str, several: bool) -> object:
    return parse(clean(gold), several)


def _near(gold: object, answer: object, form: str, metadata: dict) -> bool:
    expected, found = _number(gold), _number(answer)
    if expected is None or found is None:
        return False
    off = abs(expected.value - found.value)
    if metadata.get("error") is not None:
        return off <= Fraction(str(metadata["error"]))
    if expected.places is None or not expected.value:
        return False  # an exact gold
    half_a_digit = Fraction(10) ** -expected.places / 2
    return form == "numeric" and off <= half_a_digit and off <= _RELATIVE * abs(expected.value)


def _number(side: object) -> Number | None:
    if isinstance(side, Named):
        side = side.value
    return read_number(split_unit(side.text)[0]) if isinstance(side, Single) else None


def _choice(written: str) -> str | None:
    """The letter of an answer such as `C`, `(C)`, `C. 12` or `(C) 12`."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", written).strip()
    match = re.fullmatch(r"\(?\s*([A-J])\s*(?:[).:].*)?", text)
    return match[1] if match else None
