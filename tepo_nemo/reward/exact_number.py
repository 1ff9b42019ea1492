"""Numbers that can be read exactly, and what a decimal stands for."""

import re
from dataclasses import dataclass
from fractions import Fraction

_LONGEST = 2000  # digits; with the exponent still a number that Python reads and writes (4300 digits)
_LARGEST_EXPONENT = 2000
ENOUGH_DIGITS = 9  # a decimal with so many right digits stands for the exact value

_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d])")
_POWER_OF_TEN = r"10\^(?:\{([+-]?\d+)\}|([+-]?\d+))"
_SCIENTIFIC = re.compile(rf"({_DECIMAL})(?:[eE]([+-]?\d+)|\\cdot{_POWER_OF_TEN})")
_TEN = re.compile(_POWER_OF_TEN)
_PLAIN = re.compile(_DECIMAL)
_QUOTIENT = re.compile(rf"([+-]?{_DECIMAL})/([+-]?{_DECIMAL})")
_FRACTION = re.compile(rf"\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}}")
_MIXED = re.compile(r"(\d+) ?\\frac\{(\d+)\}\{(\d+)\}|(\d+) (\d+)/(\d+)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}")
_WHOLE_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+")


@dataclass(frozen=True)
class Number:
    """A value, and for a decimal the digits after its point and the significant ones."""

    value: Fraction
    places: int | None = None  # the last printed digit is worth 10**-places; None: not a decimal
    digits: int = 0

    @property
    def latex(self) -> str:
        """The value as LaTeX that cannot be misread (`1e11` could be eleven times e)."""
        return rf"\frac{{{self.value.numerator}}}{{{self.value.denominator}}}"

    def stands_for(self, exact: Fraction) -> bool:
        """Whether this decimal is `exact` rounded, or cut off, to ENOUGH_DIGITS digits or more."""
        return self.places is not None and self.digits >= ENOUGH_DIGITS and self.is_printed_of(exact)

    def is_printed_of(self, exact: Fraction) -> bool:
        """Whether `exact` shows these digits when it is rounded (half away from zero) or cut off."""
        if self.places is None:
            return self.value == exact
        unit = Fraction(10) ** -self.places
        cut = abs(exact) // unit
        rounded = (abs(exact) + unit / 2) // unit
        same_sign = self.value == 0 or (self.value > 0) == (exact > 0)
        return same_sign and abs(self.value) / unit in (cut, rounded)


def read_number(text: str) -> Number | None:
    """The number of a cleaned answer: integer, decimal, fraction, mixed number, `3.8e5`, `3.8*10^5`, percent.

    Thousands may be marked with commas. None where it is anything else, or has too many digits.
    """
    if len(text) > _LONGEST:
        return None
    text = text.strip()
    percent = re.fullmatch(
        r"(.*?) ?(?:%|\\text\{ ?(?:percent|pct|per cent|percentage) ?\}|percent|pct)", text
    )
    if percent:
        number = read_number(percent[1])
        if number is None:
            return None
        places = None if number.places is None else number.places + 2
        return Number(number.value / 100, places, number.digits)
    if _WHOLE_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    if mixed := _MIXED.fullmatch(text[1:] if text[:1] in ("+", "-") else text):
        whole, top, bottom = (int(part) for part in mixed.groups() if part is not None)
        if 0 < top < bottom:
            return Number((whole + Fraction(top, bottom)) * (-1 if text.startswith("-") else 1))
    if re.search(r"[\d.]\s+[\d.]", text):
        return None  # two numbers
    if not any(bracket in text for bracket in "(["):  # where commas stand between values
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return _signed(re.sub(r"\s+", "", text))


def _signed(text: str) -> Number | None:
    sign = -1 if text.startswith("-") else 1
    number = _unsigned(text[1:] if text[:1] in ("+", "-") else text)
    return number and Number(sign * number.value, number.places, number.digits)


def _unsigned(text: str) -> Number | None:
    if _PLAIN.fullmatch(text):
        return _decimal(text, 0)
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = int(next(group for group in match.groups()[1:] if group is not None))
        return _decimal(match[1], exponent) if abs(exponent) <= _LARGEST_EXPONENT else None
    if match := _TEN.fullmatch(text):
        exponent = int(match[1] or match[2])
        return Number(Fraction(10) ** exponent) if abs(exponent) <= _LARGEST_EXPONENT else None
    if match := _QUOTIENT.fullmatch(text) or _FRACTION.fullmatch(text):
        bottom = Fraction(match[2])
        return Number(Fraction(match[1]) / bottom) if bottom else None
    if match := _REPEATING.fullmatch(text):
        whole, first, period = match.groups()
        nines = 10 ** len(first) * (10 ** len(period) - 1)
        return Number(Fraction(f"{whole or 0}.{first or 0}") + Fraction(int(period), nines))
    if text.startswith("(") and text.endswith(")") and "(" not in text[1:]:
        return _signed(text[1:-1])
    return None


def _decimal(text: str, exponent: int) -> Number:
    value = Fraction(text) * Fraction(10) ** exponent
    if "." not in text and exponent == 0:
        return Number(value)
    places = len(text.partition(".")[2]) - exponent
    return Number(value, places, len(text.replace(".", "").lstrip("0")))
