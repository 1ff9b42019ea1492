"""How an answer is put together: lists, tuples, sets, intervals, relations, names, single expressions."""

import re
from dataclasses import dataclass

from tepo_nemo.reward.exact_number import read_number
from tepo_nemo.reward.latex import closing, split, squeezed

RELATION = (
    r"(=|<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\approx(?![A-Za-z])|\\equiv(?![A-Za-z]))"
)
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}

_SYMBOL = r"(?:[A-Za-z]|\\[A-Za-z]+)(?:_(?:\{[^{}]*\}|\\?\w))?'*(?:\^(?:\{?[*']\}?))?"
_NAME = re.compile(
    rf"(?:{_SYMBOL}|[A-Z]{{2,}}\d*|\\text\{{[^{{}}]*\}}|[A-Za-z]{{3,}}(?:\s[A-Za-z]+)*"
    rf"|(?:{_SYMBOL})(?:\^\{{-1\}})?\((?:\\?\w|,|{_SYMBOL}|\s)+\)"  # f(x), P(A, B)
    rf"|\\angle\s?\S+|\\(?:overline|vec|hat|bar|dot|widehat)\{{[^{{}}]*\}}(?:_\{{?\w+\}}?)?"
    r"|\\(?:sin|cos|tan|cot|sec|csc|log|ln|max|min|gcd|arg)(?:_\{?\w+\}?)?\s?(?:\\?[A-Za-z]+|\(\\?[A-Za-z]+\))"
    r"|\|\\?[A-Za-z]+\||\\(?:triangle|measuredangle)\s?\S+)"
)


@dataclass(frozen=True)
class Single:
    """One expression, word or number."""

    text: str


@dataclass(frozen=True)
class Several:
    """Answers beside each other: a list or a set in braces. Their order says nothing."""

    items: tuple
    braces: bool = False


@dataclass(frozen=True)
class Ordered:
    """A tuple, a vector, or the two ends of an interval: what it is, the brackets cannot tell."""

    items: tuple
    brackets: str


@dataclass(frozen=True)
class Union:
    parts: tuple


@dataclass(frozen=True)
class Matrix:
    rows: tuple  # of tuples


@dataclass(frozen=True)
class Ratio:
    parts: tuple


@dataclass(frozen=True)
class Named:
    """`x = 5`, `f(x) = 1`, `x \\in A`: the other side may leave the name out. Further sides say the same."""

    name: str
    value: object
    also: tuple = ()


@dataclass(frozen=True)
class Relation:
    """Sides with signs between them, and no name for a single value."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]

    def flipped(self) -> "Relation":
        return Relation(self.sides[::-1], tuple(_FLIPPED.get(sign, sign) for sign in self.signs[::-1]))


def is_name(text: str) -> bool:
    """Whether this is what an answer is called, and not a part of an equation: `x`, `f(x)`, `AB`, `(p,q)`."""
    text = text.strip()
    if text in ("\\pi", "\\infty", "e"):
        return False
    if text.startswith("(") and closing(text, 0) == len(text) - 1:
        return all(is_name(part) for part in split(text[1:-1], ","))
    if fraction := re.fullmatch(r"\\frac\{([^{}]+)\}\{([^{}]+)\}", text):
        return is_name(fraction[1]) and is_name(fraction[2])
    if len(parts := split(text, ":|/")) > 1:
        return all(is_name(part) for part in parts)
    return (
        _NAME.fullmatch(text) is not None or re.fullmatch(r"\\angle( [A-Z](_\{?\d\}?)?)+", text) is not None
    )


def parse(text: str, several: bool = False) -> object:
    """The structure of a cleaned answer. `several`: a comma never marks thousands."""
    if text.startswith("\\langle") and text.find("\\rangle") == len(text) - 7:
        return Ordered(_items(text[7:-7]), "<>")
    number = None if several else read_number(text)
    if number is None or "," not in text:
        parts = [part for part in split(text, r"(?:,|;)") if part]
        if len(parts) > 1:
            return Several(tuple(item for part in parts for item in _flat(parse(part))))
    if number is not None:
        return Single(text)
    if inside := re.fullmatch(r"([^\\]*?|\\[A-Za-z]+(?:_\S+)?)\s*\\in(?![A-Za-z])(.*)", text):
        if is_name(inside[1]):
            return Named(squeezed(inside[1]), parse(inside[2].strip()))
    union = [part for part in split(text, r"\\cup(?![A-Za-z])")]
    if len(union) > 1:
        sets = [parse(part) for part in union]
        if all(isinstance(part, Several) and part.braces for part in sets):
            return Several(tuple(item for part in sets for item in part.items), braces=True)
        name, _, first = union[0].rpartition("=")
        if name and is_name(name):
            return Named(squeezed(name), Union(tuple(parse(part) for part in [first, *union[1:]])))
        return Union(tuple(parse(part) for part in union))
    if len(sides := split(text, RELATION)) > 1:
        return _related(sides[::2], sides[1::2])
    return _bracketed(text) or _expanded(text)


def _flat(item: object) -> tuple:
    """The answers of one part of a list: `x = 1 \\pm 2` are two."""
    if isinstance(item, Named) and not item.also and isinstance(item.value, Several):
        return tuple(Named(item.name, value) for value in _flat(item.value))
    return item.items if isinstance(item, Several) and not item.braces else (item,)


def _related(sides: list[str], signs: list[str]) -> object:
    if "\\approx" in signs:  # what follows an exact value is no part of the answer
        cut = signs.index("\\approx")
        before = [side for side in sides[: cut + 1] if side]
        if any(not is_name(side) for side in before):
            sides, signs = sides[: cut + 1], signs[:cut]
        else:
            sides, signs = before + sides[cut + 1 :], ["="] * (len(before) - 1 + len(sides) - cut - 1)
        if len(sides) == 1:
            return parse(sides[0])
    sides = [side for side in sides] if all(sides) else sides
    if set(signs) == {"="}:
        first, *values = sides
        if not is_name(first) and is_name(sides[-1]) and len(sides) == 2:
            first, values = sides[-1], [sides[0]]
        words = re.compile(r"[A-Z]{2,}")
        if is_name(first) and all(values) and not (words.fullmatch(first) and words.fullmatch(values[0])):
            while len(values) > 1 and is_name(values[0]):
                values = values[1:]
            value, *also = [parse(value) for value in values]
            return Named(squeezed(first), value, tuple(also))
    return Relation(tuple(sides), tuple(signs))


def _bracketed(text: str) -> object | None:
    if matrix := re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text, re.DOTALL):
        rows = [row for row in split(matrix[1], r"\\\\") if row]
        return Matrix(tuple(tuple(parse(cell) for cell in split(row, "&")) for row in rows))
    builder = re.fullmatch(r"\\\{([^|:]*)[|:](.*)\\\}", text)  # a set by its condition
    if builder and is_name(re.sub(r"\\in(?![A-Za-z]).*", "", builder[1])):
        return parse(builder[2].strip())
    if text.startswith("\\{") and text.endswith("\\}") and closing(text, 1) == len(text) - 1:
        return Several(_items(text[2:-2]), braces=True)
    if text[:1] in ("(", "[") and text and closing(text, 0) == len(text) - 1:
        inner = text[1:-1].strip()
        items = _items(inner)
        if len(items) > 1 or text[0] == "[":
            return Ordered(items, text[0] + text[-1])
        if text[-1] == ")":
            return parse(inner)
    return None


def _items(text: str) -> tuple:
    return tuple(item for part in split(text, r"(?:,|;)") if part for item in _flat(parse(part)))


def _expanded(text: str) -> object:
    """Plus-minus is two answers, and a colon is a ratio."""
    if "\\pm" in text or "\\mp" in text:
        signs = (("+", "-"), ("-", "+"))
        both = [
            re.sub(r"\\pm(?![A-Za-z])", plus, re.sub(r"\\mp(?![A-Za-z])", minus, text))
            for plus, minus in signs
        ]
        return Several(tuple(Single(_without_plus(side)) for side in both))
    parts = split(text, ":")
    if len(parts) > 1 and all(parts):
        return Ratio(tuple(parse(part) for part in parts))
    return Single(text)


def _without_plus(text: str) -> str:
    return re.sub(r"(^|[({])\s*\+\s*", r"\1", text.strip())
