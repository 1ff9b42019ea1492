"""Units behind a number: told apart, since `5 km` is not `5 m`, and left out where only one side has one."""

import re

_SYNONYMS = {
    "degree": "degrees deg ° circ", "inch": "inches in", "foot": "feet ft", "yard": "yards yd",
    "mile": "miles mi", "meter": "meters metre metres m",
    "centimeter": "centimeters centimetre centimetres cm",
    "millimeter": "millimeters millimetre millimetres mm", "kilometer": "kilometers kilometre kilometres km",
    "gram": "grams g", "kilogram": "kilograms kg", "milligram": "milligrams mg", "pound": "pounds lb lbs",
    "ounce": "ounces oz", "second": "seconds sec secs s", "minute": "minutes min mins",
    "hour": "hours hr hrs h", "day": "days", "week": "weeks", "month": "months", "year": "years yr yrs",
    "liter": "liters litre litres l L", "milliliter": "milliliters ml mL", "dollar": "dollars usd USD",
    "cent": "cents", "newton": "newtons N", "joule": "joules J", "kelvin": "kelvins K", "pascal": "Pa",
    "mol": "mole moles", "hertz": "Hz", "watt": "watts W", "volt": "volts V", "unit": "units",
    "radian": "radians rad", "celsius": "C", "byte": "bytes B", "megabyte": "megabytes MB", "mph": "",
    "kcal": "", "cal": "calories", "amp": "amps A", "coulomb": "coulombs", "ohm": "ohms",
    "angstrom": "angstroms", "eV": "", "erg": "ergs", "au": "AU", "pc": "parsec parsecs", "lightyear": "ly",
}  # fmt: skip
_NAMES = {name: unit for unit, names in _SYNONYMS.items() for name in [unit, *names.split()]}
# Words that change the value of the number before them.
_NO_UNITS = set(
    """
    and or mod modulo base choose factorial squared cubed more less least most than not times plus minus
    over percent percentage pct hundred thousand million billion trillion dozen half third quarter of to
    root if for when where infinity is are no none negative positive pi square-root double triple twice
    times divided other otherwise except but only also approximately about around between from up down
    undefined
    """.split()
)
_WORDS = r"[A-Za-z][A-Za-z.]*(?:[ ~-][A-Za-z][A-Za-z.]*){0,5}"
_POWER = r"(?:\^(?:\{-?\d\}|-?\d))?"
_UNIT = re.compile(
    r"(?P<value>.*?[\d})a-z|])\s*(?P<unit>"
    r"\^\\circ(?: ?(?:C|F))?"
    rf"|(?:[/ ]*(?:\\cdot )?(?:\\text\{{[^{{}}]*\}}){_POWER})+(?: ?/ ?[A-Za-z]+{_POWER})?"
    rf"|(?:(?<=\d)|(?<=\d[}}) ])|(?<=\d[}})] )){_WORDS}{_POWER}(?: ?/ ?{_WORDS}{_POWER})?"
    r")"
)


def split_unit(text: str) -> tuple[str, str]:
    """Value and unit of a cleaned answer; the unit is "" where there is none.

    A unit is a degree sign, a word in `\\text{}`, or after a number words of three letters and more or a
    known short name. Words that change the value ("dozen", "factorial") are none.
    """
    match = _UNIT.fullmatch(text)
    if match is None:
        return text, ""
    value, unit = match["value"].strip(), _name(match["unit"])
    if unit == "degree" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", value):
        return text, ""  # of an angle inside
    in_words = match["unit"][0].isalpha()
    # A single letter behind a number is a variable.
    if unit is None or (in_words and not re.match(r"[A-Za-z]{2}|[a-z]/", match["unit"])):
        return text, ""
    return value, unit


def same_unit(first: str, second: str) -> bool:
    """Whether two units do not contradict each other; one that is missing, or just "units", never does."""
    return first == second or not {first, second}.isdisjoint({"", "unit", "unit^2", "unit^3"})


def _name(written: str) -> str | None:
    """One spelling of a unit; None for words that are no unit."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", written).replace("~", " ").replace("\\cdot", " ")
    text = re.sub(r"\^\{(-?\d)\}", r"^\1", text.replace("^\\circ", " degree ")).replace(" ^", "^")
    text = re.sub(r"\bper\b", "/", text)
    parts: list[str] = []
    power = ""
    for word in re.findall(r"/|[A-Za-z°.-]+(?:\^-?\d)?", text):
        name, _, exponent = word.rstrip(".").partition("^")
        name = name.rstrip(".")
        if name.lower() in _NO_UNITS or (len(name) < 3 and name not in _NAMES and name != "/"):
            return None
        if name.lower() in ("square", "sq"):
            power = "^2"
        elif name.lower() in ("cubic", "cu"):
            power = "^3"
        else:
            known = _NAMES.get(name) or _NAMES.get(name.lower()) or name.lower()
            parts.append(known + (f"^{exponent}" if exponent else power))
            power = ""
    return " ".join(parts) or None
