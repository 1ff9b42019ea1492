"""Whether two expressions are equal: math-verify reads and compares them, numbers have the last word.

Everything here may run forever or take all memory (one nested power is enough): it runs in a worker process
that can be killed.
"""

import logging
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify.errors import TimeoutException
from math_verify.grader import verify
from sympy.core.function import AppliedUndef

from tepo_nemo.reward.exact_number import Number

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of limits that are ours to set

_LONGEST = 10_000  # characters that the parser is given; cleaning an answer adds braces
_LARGEST = 20_000  # decimal digits of a number that is still written out
_MOST_TERMS = 1000  # of a sum or a product
_POINTS = 6  # where expressions with variables are compared
_CASES = ConversionConfig(lowercase_symbols=False, interpret_as_mixed_fractions=False)
_WHOLE = (sympy.floor, sympy.ceiling, sympy.factorial, sympy.binomial, sympy.Mod, sympy.Sum, sympy.Product)
_LOG = re.compile(r"\\log(?![A-Za-z]|\s*_)")


class TooLarge(Exception):
    """A number has more digits than anybody will write out."""


def expressions_equal(gold: str, answer: str) -> bool:
    """Whether two cleaned LaTeX expressions are equal; False also where one of them cannot be read.

    Both are evaluated, with more digits than their numbers have, at several points where they have
    variables. Only what cannot be evaluated is left to math-verify, which alone takes 1/2004! for 1/2006!
    """
    if _equal(gold, answer):
        return True
    natural = [
        _LOG.sub(r"\\ln ", text) for text in (gold, answer)
    ]  # the base of a bare logarithm is not known
    return natural != [gold, answer] and _equal(*natural)


def _equal(gold: str, answer: str) -> bool:
    first, second = _parse(gold), _parse(answer)
    if first is None or second is None:
        return False
    try:
        verdict = _same_values(first, second)
    except TooLarge:
        return first == second
    return _verify(first, second) if verdict is None else verdict


def value_is_printed(exact: str, decimal: Number) -> bool:
    """Whether a decimal shows enough digits of an expression without variables."""
    expression = _parse(exact)
    if expression is None or expression.free_symbols or decimal.digits < 9:
        return False
    try:
        value = _value(expression, decimal.digits + 20)
    except TooLarge:
        return False
    if value is None or sympy.im(value) != 0:
        return False
    return decimal.stands_for(Fraction(str(sympy.re(value))))


@lru_cache(maxsize=4096)
def _parse(latex: str) -> sympy.Basic | None:
    """The expression with `e`, `i` and `\\pi` as numbers and functions that nobody knows as variables."""
    if len(latex) > _LONGEST or re.search(r"(?<![_\d])\d+ \d", latex):
        return None
    text = re.sub(r"(?<![A-Za-z_\d.])(?<!_\{)(?:\d*\.\d+|\d+\.(?!\d))", _as_fraction, _readable(latex))
    try:
        expression = latex2sympy(
            text, convert_degrees=True, normalization_config=None, conversion_config=_CASES
        )
    except (Exception, TimeoutException):  # the parser raises whatever it likes
        return None
    if not isinstance(expression, sympy.Expr | sympy.MatrixBase):
        return None
    constants = {sympy.Symbol("e"): sympy.E, sympy.Symbol("i"): sympy.I, sympy.Symbol("pi"): sympy.pi}
    functions = {f: sympy.Symbol(sympy.srepr(f)) for f in expression.atoms(AppliedUndef)}
    return expression.xreplace(functions | constants)


def _as_fraction(decimal: re.Match) -> str:
    value = Fraction(decimal[0])
    return rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"


def _readable(latex: str) -> str:
    """LaTeX that the parser takes for what it means."""
    text = latex.replace("\\odot", "odot")
    text = re.sub(r"(?<![\d^\s])\s*(\d+) ?\\frac\{(\d+)\}\{(\d+)\}", _improper, " " + text).strip()
    # Letters that the parser has other uses for.
    text = re.sub(r"(?<![A-Za-z\\{])(I|[Ee](?=_))(?:_\{?(\w+)\}?)?(?![A-Za-z])", _renamed, text)
    text = re.sub(r"\\(gamma|prime)(?:_\{?(\w+)\}?)?(?![A-Za-z])", _renamed, text)
    text = re.sub(r"(?<=\d) ?\(", r"\\cdot (", text)  # which the parser takes for a mixed number
    # A derivative or a dotted, primed or barred letter is a variable of its own.
    text = re.sub(
        r"\\frac\{d(\^\{?\d\}?)? ?(\\?[A-Za-z]+)(?:_\{?(\w+)\}?)?\}\{d ?(\\?[A-Za-z])(\^\{?\d\}?)?\}",
        lambda m: "D_{" + re.sub(r"\W", "", "".join(part or "" for part in m.groups())) + "}",
        text,
    )
    text = re.sub(r"\\(d?dot|bar|hat|vec|tilde|overline)\{(\\?[A-Za-z]+)\}_?\{?(\w*)\}?", _decorated, text)
    text = re.sub(r"(\\?[A-Za-z]+)(?:_\{?(\w+)\}?)?('+)", _primed, text)
    text = re.sub(r"(\d+!|[a-z]!)(?=\^)", r"(\1)", text)
    text = re.sub(r"\\(sin|cos|tan|cot|sec|csc)\^\{-1\}", r"\\arc\1 ", text)
    text = re.sub(r"\\exp ?\(", r"\\exp(", text)
    text = re.sub(r"\\text\{ ?([^{}]*?) ?\}", lambda m: "T_{" + re.sub(r"\W", "", m[1]) + "}", text)
    text = re.sub(r"(?<![A-Za-z\\])([A-Za-z])\((\d+)\)", r"\1_{at\2}", text)
    return text


def _improper(mixed: re.Match) -> str:
    whole, top, bottom = (int(group) for group in mixed.groups())
    return rf" (\frac{{{whole * bottom + top}}}{{{bottom}}})" if top < bottom else mixed[0]


def _renamed(match: re.Match) -> str:
    return "T_{" + "".join(re.sub(r"\W", "", part or "") for part in match.groups()) + "}"


def _decorated(match: re.Match) -> str:
    return "D_{" + re.sub(r"\W", "", "".join(match.groups())) + "}"


def _primed(match: re.Match) -> str:
    letters = re.sub(r"\W", "", match[1] + (match[2] or ""))
    return "D_{" + letters + "p" * len(match[3]) + "}"


def _same_values(first: sympy.Basic, second: sympy.Basic) -> bool | None:
    """None where the values do not tell."""
    if isinstance(first, sympy.MatrixBase) or isinstance(second, sympy.MatrixBase):
        return None
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    digits = 40 + 2 * int(max(_digits(first), _digits(second)))
    if not symbols:
        return _close(first, second, digits)
    compared = 0
    for point in _points(symbols, first, second):
        verdict = _close(first.xreplace(point), second.xreplace(point), digits)
        if verdict is False:
            return False
        compared += verdict is True
    return True if compared >= _POINTS // 2 else None


def _points(symbols: list, first: sympy.Basic, second: sympy.Basic) -> Iterator[dict]:
    """Where to compare: whole numbers where the expressions are made for them, else fractions above 0.

    With an absolute value also negative ones, since sqrt(x^2) is x for the positive alone.
    """
    chance = random.Random(7)
    whole = any(expression.has(*_WHOLE) or _has_sign_power(expression) for expression in (first, second))
    signs = (1, -1) if first.has(sympy.Abs) or second.has(sympy.Abs) else (1,)
    for number in range(_POINTS):
        yield {
            symbol: sympy.Integer(chance.randrange(3, 8) + number)
            if whole
            else signs[number % len(signs)] * sympy.Rational(chance.randrange(101, 997), 211)
            for symbol in symbols
        }


def _has_sign_power(expression: sympy.Basic) -> bool:
    return any(power.base.is_negative and power.exp.free_symbols for power in expression.atoms(sympy.Pow))


def _close(first: sympy.Basic, second: sympy.Basic, digits: int) -> bool | None:
    """Whether two expressions without variables have one value, to `digits` significant digits."""
    if first == second:
        return True
    a, b = _value(first, digits), _value(second, digits)
    if a is None or b is None:
        return None
    if a.is_Rational and b.is_Rational:
        return a == b
    scale = max(abs(a), abs(b), sympy.Float(10, digits) ** (-digits // 2))  # a zero is a rest of rounding
    return bool(abs(a - b) <= scale * sympy.Float(10, digits) ** (20 - digits))


def _value(expression: sympy.Basic, digits: int) -> sympy.Expr | None:
    """A number, exact where it is rational; None where it has no finite value."""
    _digits(expression)
    try:
        value = expression.doit()
        if not value.is_Rational:
            value = sympy.N(value, digits, maxn=4 * digits)
    except (ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, TimeoutException):
        return None
    return value if value.is_number and value.is_finite and not value.has(sympy.Function) else None


def _digits(expression: sympy.Basic) -> float:
    """About the number of decimal digits of the largest number in it. Raises TooLarge before it is made."""
    if isinstance(expression, sympy.Tuple):  # the limits of a sum
        found = max(_digits(argument) for argument in expression.args)
    elif isinstance(expression, sympy.Rational):
        found = max(abs(expression.p).bit_length(), expression.q.bit_length()) * 0.30103
    elif isinstance(expression, sympy.Pow | sympy.exp):
        base, exponent = expression.as_base_exp()
        times = _size(exponent)
        found = max(_digits(base), 1.0) * max(times, 1.0)
    elif isinstance(expression, sympy.factorial | sympy.gamma):
        size = _size(expression.args[0])
        found = size * max(_digits(expression.args[0]), 1.0)
    elif isinstance(expression, sympy.binomial):
        found = max(_size(argument) for argument in expression.args)
    elif isinstance(expression, sympy.Sum | sympy.Product):
        if not expression.free_symbols and any(
            _size(end) > _MOST_TERMS for _, *ends in expression.limits for end in ends
        ):
            raise TooLarge
        found = max(_digits(argument) for argument in expression.args)
    elif isinstance(expression, sympy.Mul):
        found = sum(_digits(argument) for argument in expression.args)
    else:
        found = max((_digits(argument) for argument in expression.args), default=0.0)
    if found > _LARGEST:
        raise TooLarge
    return found


def _size(expression: sympy.Basic) -> float:
    """The absolute value of a number, about; of a variable it is small."""
    digits = _digits(expression)
    if expression.free_symbols:
        return 10.0**digits * 20
    if digits > 12:
        raise TooLarge
    value = _value(expression, 15)
    return 1.0 if value is None else float(abs(value))


def _verify(first: sympy.Basic, second: sympy.Basic) -> bool:
    """math-verify's verdict, without its own time limit, which works by signals."""
    try:
        return verify(first, second, timeout_seconds=None)
    except TimeoutException:  # no Exception
        return False


def constant_ratio(gold: str, answer: str) -> float | None:
    """The real number that the first expression is of the second one everywhere; None where there is none."""
    first, second = _parse(gold), _parse(answer)
    if not isinstance(first, sympy.Expr) or not isinstance(second, sympy.Expr):
        return None
    symbols = sorted(first.free_symbols, key=str)
    if not symbols or first.free_symbols != second.free_symbols:
        return None
    ratios = []
    try:
        digits = 40 + 2 * int(max(_digits(first), _digits(second)))
        for point in _points(symbols, first, second):
            a, b = _value(first.xreplace(point), digits), _value(second.xreplace(point), digits)
            if a is None or b is None or not a.is_real or not b.is_real or a == 0 or b == 0:
                return None
            ratios.append(a / b)
    except TooLarge:
        return None
    same = all(_close(ratio, ratios[0], digits) for ratio in ratios)
    return float(ratios[0]) if same else None
