"""Whether two structures of answers mean the same."""

import re

from tepo_nemo.reward.exact_number import Number, read_number
from tepo_nemo.reward.latex import squeezed
from tepo_nemo.reward.structure import (
    Matrix,
    Named,
    Ordered,
    Ratio,
    Relation,
    Several,
    Single,
    Union,
    is_name,
)
from tepo_nemo.reward.units import same_unit, split_unit

_MOST_ITEMS = 200
_BASE = re.compile(r"\(?([0-9A-Z]+)\)?_(?:\{(-?\w+)\}|(\w))")
_CHOICE = re.compile(r"\(?\s*(?:\\text\{\s*)?\(?\s*([A-J])\s*\)?\s*\}?\s*\)?")
_WORDS = re.compile(r"(?=.*(?:\\text|[A-Za-z]{3}))(?:\\text\{[^{}]*\}|[A-Za-z]+(?=\W|$)|[\s'’.-])+")


def equal(gold: object, answer: object) -> bool:
    """Whether an answer is right: see the table in the README of this folder. Not symmetric in names."""
    match gold, answer:
        case Named(), Named():
            return _named(gold, answer)
        case Named(), Several() | Ordered() if re.fullmatch(r"\(.*,.*\)", gold.name):
            return _values_of_names(gold, answer)
        case Named(), Relation():
            return _same_region(gold.value, answer) or _related(_as_relation(gold), answer)
        case Named(), _:
            return equal(gold.value, answer)
        case Relation(), Named():
            return _related(gold, _as_relation(answer))
        case _, Named():
            return all(equal(gold, value) for value in (answer.value, *answer.also))
        case Relation(), Relation():
            return _related(gold, answer) or _same_region(gold, answer)
        case Single(), Relation():
            return set(answer.signs) == {"="} and all(equal(gold, Single(side)) for side in answer.sides)
        case Several(), Several():
            return _in_any_order(gold.items, answer.items) or _same_region(gold, answer)
        case Ordered(), Ordered():
            return _brackets_agree(gold, answer) and _in_order(gold.items, answer.items)
        case Ordered(), Several():
            return _listed(gold, answer)
        case Union(), Union():
            return _in_any_order(gold.parts, answer.parts) or _same_region(gold, answer)
        case Matrix(), Matrix():
            return len(gold.rows) == len(answer.rows) and all(map(_in_order, gold.rows, answer.rows))
        case (Matrix(), Ordered()) | (Ordered(), Matrix()):
            return _vector(gold, answer)
        case Ratio(), Ratio():
            return _proportional(gold, answer)
        case (Ratio(), Single()) | (Single(), Ratio()):
            return equal(_as_fraction(gold), _as_fraction(answer))
        case Single(), Single():
            return singles_equal(gold.text, answer.text)
        case Several(items=(only,)), _:
            return equal(only, answer)
        case _, Several(items=(only,), braces=True):
            return equal(gold, only)
    return _same_region(gold, answer)


def singles_equal(gold: str, answer: str) -> bool:
    """Whether two expressions, numbers or words are the same."""
    if squeezed(gold) == squeezed(answer):
        return bool(squeezed(gold))
    if _BASE.fullmatch(squeezed(gold)) or _BASE.fullmatch(squeezed(answer)):
        return _same_base(squeezed(gold), squeezed(answer))
    first, second = read_number(gold), read_number(answer)
    if first and second:
        return numbers_equal(first, second)
    gold_value, gold_unit = split_unit(gold)
    answer_value, answer_unit = split_unit(answer)
    if gold_unit or answer_unit:
        if same_unit(gold_unit, answer_unit) and singles_equal(gold_value, answer_value):
            return True
        if {gold_unit, answer_unit} != {"", "degree"}:
            return False
    if (choice := _CHOICE.fullmatch(gold)) and (chosen := _CHOICE.fullmatch(answer)):
        return choice[1] == chosen[1]
    if "\\text" in gold + answer or (_WORDS.fullmatch(gold) and _WORDS.fullmatch(answer)):
        if _words(gold) is not None and _words(gold) == _words(answer):
            return True
        if _words(gold) is not None or _words(answer) is not None:
            return False
    return _expressions_equal(gold, answer, first, second)


def numbers_equal(gold: Number, answer: Number) -> bool:
    """Equal in value; or one is a decimal with enough right digits of the other."""
    return gold.value == answer.value or answer.stands_for(gold.value) or gold.stands_for(answer.value)


def _expressions_equal(gold: str, answer: str, first: Number | None, second: Number | None) -> bool:
    # Imported late: reading numbers and words needs none of it, and it takes a second.
    from tepo_nemo.reward.symbolic import expressions_equal, value_is_printed

    if expressions_equal(first.latex if first else gold, second.latex if second else answer):
        return True
    if second is not None and second.places is not None:
        return value_is_printed(gold, second)
    return first is not None and first.places is not None and value_is_printed(answer, first)


def _words(text: str) -> str | None:
    """Words in one spelling; None where there is more than words."""
    if not _WORDS.fullmatch(text):
        return None
    return " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).lower().rstrip(". ").split())


def _same_base(gold: str, answer: str) -> bool:
    first, second = _BASE.fullmatch(gold), _BASE.fullmatch(answer)
    if first is None or second is None:
        return False
    return first[1].lstrip("0") == second[1].lstrip("0") and (first[2] or first[3]) == (
        second[2] or second[3]
    )


def _in_order(gold: tuple, answer: tuple) -> bool:
    return len(gold) == len(answer) <= _MOST_ITEMS and all(map(equal, gold, answer))


def _in_any_order(gold: tuple, answer: tuple) -> bool:
    """Each answer is one of the golds, and each gold is one of the answers."""
    if len(gold) != len(answer) or len(gold) > _MOST_ITEMS:
        return False
    left = list(answer)
    for item in gold:
        found = next((i for i, other in enumerate(left) if equal(item, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _named(gold: Named, answer: Named) -> bool:
    if gold.name == answer.name:
        return all(equal(gold.value, value) for value in (answer.value, *answer.also))
    return _related(_as_relation(gold), _as_relation(answer))


def _values_of_names(gold: Named, answer: Several | Ordered) -> bool:
    """(p, q) = (3, 2) beside p = 3, q = 2 in any order, beside (3, 2), and beside 3, 2."""
    if not isinstance(gold.value, Ordered):
        return equal(gold.value, answer)
    names = gold.name[1:-1].split(",")
    if isinstance(answer, Several) and len(names) == len(gold.value.items):
        named = tuple(Named(name, value) for name, value in zip(names, gold.value.items, strict=True))
        if all(isinstance(item, Named) for item in answer.items):
            return _in_any_order(named, answer.items)
    return _in_order(gold.value.items, answer.items)


def _listed(gold: Ordered, answer: Several) -> bool:
    """A tuple written without its brackets: x = 3, y = 2, or three values and more in their order."""
    if answer.braces or gold.brackets not in ("()", "<>"):
        return False
    names = [item.name for item in answer.items if isinstance(item, Named)]
    if len(answer.items) < 3 and len(names) != 2:
        return False
    return len(set(names)) == len(names) and _in_order(gold.items, answer.items)


def _brackets_agree(gold: Ordered, answer: Ordered) -> bool:
    """Two values may be the ends of an interval, where brackets matter."""
    if len(gold.items) != 2 or "<>" in (gold.brackets, answer.brackets):
        return True
    return gold.brackets == answer.brackets


def _vector(gold: Matrix | Ordered, answer: Matrix | Ordered) -> bool:
    """A column or a row beside a tuple."""
    flat = []
    for side in (gold, answer):
        if isinstance(side, Ordered):
            flat.append(side.items)
        elif len(side.rows) == 1 or all(len(row) == 1 for row in side.rows):
            flat.append(tuple(cell for row in side.rows for cell in row))
        else:
            return False
    return _in_order(*flat)


def _proportional(gold: Ratio, answer: Ratio) -> bool:
    if _in_order(gold.parts, answer.parts):
        return True
    numbers = [
        [read_number(part.text) if isinstance(part, Single) else None for part in side.parts]
        for side in (gold, answer)
    ]
    if len(numbers[0]) != len(numbers[1]) or not all(
        number and number.value for side in numbers for number in side
    ):
        return False
    return len({a.value / b.value for a, b in zip(*numbers, strict=True)}) == 1


def _as_fraction(side: object) -> object:
    if isinstance(side, Ratio) and len(side.parts) == 2 and all(isinstance(p, Single) for p in side.parts):
        return Single(rf"\frac{{{side.parts[0].text}}}{{{side.parts[1].text}}}")
    return side


def _as_relation(named: Named) -> Relation:
    values = [value.text if isinstance(value, Single) else "" for value in (named.value, *named.also)]
    return Relation((named.name, *values), ("=",) * len(values))


def _related(gold: Relation, answer: Relation) -> bool:
    """Whether two relations say the same: side by side, turned round, or one a multiple of the other."""
    if not all(gold.sides) or not all(answer.sides):
        return False
    for turned in (answer, answer.flipped()):
        if gold.signs == turned.signs and all(
            singles_equal(a, b) for a, b in zip(gold.sides, turned.sides, strict=True)
        ):
            return True
        if gold.signs == turned.signs and len(gold.signs) == 1 and _multiple(gold, turned):
            return True
    return False


def _multiple(gold: Relation, answer: Relation) -> bool:
    from tepo_nemo.reward.symbolic import constant_ratio

    first, second = (f"({side.sides[0]})-({side.sides[1]})" for side in (gold, answer))
    ratio = constant_ratio(first, second)
    return ratio is not None and (gold.signs[0] in ("=", "\\ne") or ratio > 0)


def _same_region(gold: object, answer: object) -> bool:
    """Intervals beside inequalities."""
    first, second = _region(gold), _region(answer)
    if first is None or second is None:
        return False
    names = {name for name, *_ in first + second if name}
    return len(names) <= 1 and _in_any_order(
        tuple(Ordered(ends, brackets) for _, ends, brackets in first),
        tuple(Ordered(ends, brackets) for _, ends, brackets in second),
    )


_LOWEST, _HIGHEST = Single("-\\infty"), Single("\\infty")


def _region(side: object) -> list[tuple[str, tuple, str]] | None:
    """Intervals as (name of the variable, ends, brackets); None where this is none."""
    match side:
        case Union(parts=parts) | Several(items=parts, braces=False):
            regions = [_region(part) for part in parts]
            return None if None in regions else [interval for region in regions for interval in region]
        case Named(name=name, value=value):
            region = _region(value)
            return region and [(name, ends, brackets) for _, ends, brackets in region]
        case Ordered(items=(_, _), brackets=brackets) if brackets != "<>":
            return [("", side.items, brackets)]
        case Relation():
            return _region_of_relation(side)
    return None


def _region_of_relation(relation: Relation) -> list[tuple[str, tuple, str]] | None:
    if relation.signs[0] in (">", "\\ge"):
        relation = relation.flipped()
    sides, signs = relation.sides, relation.signs
    brackets = {"<": "()", "\\le": "[]"}
    if len(sides) == 3 and is_name(sides[1]) and all(sign in brackets for sign in signs):
        ends = (Single(sides[0]), Single(sides[2]))
        return [(sides[1], ends, brackets[signs[0]][0] + brackets[signs[1]][1])]
    if len(sides) != 2 or is_name(sides[0]) == is_name(sides[1]):
        return None
    named_first = is_name(sides[0])
    name, end = (sides[0], Single(sides[1])) if named_first else (sides[1], Single(sides[0]))
    if signs[0] == "\\ne":
        return [(name, (_LOWEST, end), "()"), (name, (end, _HIGHEST), "()")]
    if signs[0] not in brackets:
        return None
    if named_first:
        return [(name, (_LOWEST, end), "(" + brackets[signs[0]][1])]
    return [(name, (end, _HIGHEST), brackets[signs[0]][0] + ")")]
