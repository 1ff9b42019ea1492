"""One spelling for answers that mean the same: what of their LaTeX is mere writing is taken away here."""

import re

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ",
        "∈": r"\in ", "°": r"^\circ ", "²": "^2", "³": "^3", "√": r"\sqrt ", "±": r"\pm ",
        "½": r"\frac{1}{2}",
        "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "∅": r"\emptyset ", "％": "%", "\u00a0": " ",
        "\u202f": " ", "\u2009": " ", "€": "", "£": "",
    }
)  # fmt: skip
_REPLACED = [
    (r"\\\\\[[^\]]*\]", r"\\\\"),  # a row of a matrix with its spacing
    (r"\\(?:left|right)\s*\.", ""),
    (r"\\(?:left|right|displaystyle|textstyle|limits|nolimits|[bB]igg?[lrm]?)(?![A-Za-z])", ""),
    (r",\\!\s*", ","),
    (r"\\!", ""),
    (r"\{,\}", ","),
    (r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", ""),  # thousands
    (r"\\(?:quad|qquad|hspace\*?\{[^}]*\}|thinspace)(?![A-Za-z])|(?<!\\)\\[,;: ]|~", " "),
    (r"\\\$", ""),  # currency
    (r"\$|(?<!\\)\\[()\[\]]", " "),
    (r"\\%", "%"),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\(?:geqslant|geqq|geq)(?![A-Za-z])|>=", r"\\ge "),
    (r"\\(?:leqslant|leqq|leq)(?![A-Za-z])|<=", r"\\le "),
    (r"\\(?:neq|not\s*=)(?![A-Za-z])|!=", r"\\ne "),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\(?:simeq|cong|thickapprox)(?![A-Za-z])", r"\\approx "),
    (r"\\(?:varnothing)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
    (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
    (r"\\(?:lvert|rvert|vert)(?![A-Za-z])", "|"),
    (r"\\(?:mid)(?![A-Za-z])", "|"),
    (r"\\colon(?![A-Za-z])", ":"),
    (r"\\(?:dots|cdots|dotsc|dotsb)(?![A-Za-z])|\.\.\.", r"\\ldots "),
    (r"\\(?:degree|deg)(?![A-Za-z])", r"^\\circ "),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)", r"^\\circ "),
    (r"\\prime(?![A-Za-z])", "'"),
    (r"\^\s*(?:\{\s*('+)\s*\}|('+))", r"\1\2"),
    (r"\\begin\{(?:[bvBV]?matrix|smallmatrix|array)\}(?:\{[lcr|]+\})?", r"\\begin{pmatrix}"),
    (r"\\end\{(?:[bvBV]?matrix|smallmatrix|array)\}", r"\\end{pmatrix}"),
    (r"\*\*", "^"),
    (r"\^\s*(-?\d+)", r"^{\1}"),  # as in plain text; to LaTeX x^10 is x^1 0
    (r"_(\d{2,})", r"_{\1}"),
    (r"\\mathbb\s*\{?R\}?", r"(-\\infty,\\infty)"),
    (r"\(\s*\\approx[^()]*\)\s*$", ""),
    (r"\*|\\times(?![A-Za-z])|\\cdotp(?![A-Za-z])", r"\\cdot "),
    (r"(?<![A-Za-z])(?:np|math|numpy)\.(?=[a-z])", ""),
]
_REPLACED = [(re.compile(pattern), replacement) for pattern, replacement in _REPLACED]
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|textsf|mbox|hbox|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|"
    r"operatorname\*?)\s*\{([^{}]*)\}"
)
_BOXED = re.compile(r"\\f?boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}")
_CONNECTIVE = re.compile(
    r"\\text\{ ?(?:and|or|, ?and|, ?or|&) ?\}|(?<![A-Za-z\\{])(?:and|or)(?![A-Za-z}])", re.I
)
_FUNCTIONS = (
    "arcsin|arccos|arctan|asin|acos|atan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infty|gcd|lcm"
    "|max|min"
)
_BARE_FUNCTION = re.compile(rf"(?<![A-Za-z\\])({_FUNCTIONS})(?![A-Za-z])")
_INVERSE = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_OPERATORS = set(_FUNCTIONS.split("|")) | {"mod", "Re", "Im", "arg", "det", "tr", "sgn", "lim"}
_SHORT_UNITS = set("mgslLhKJNAVWCB")  # a letter in upright type behind a number


def clean(answer: str) -> str:
    """An answer without what does not change its meaning: spacing, fonts, delimiters, variants of commands.

    Words stay as `\\text{...}`; the words "and" and "or" become commas. The result is LaTeX again.
    """
    text = answer.translate(_UNICODE)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    while (unboxed := _BOXED.sub(r"\1", text)) != text:
        text = unboxed
    while (plain := _TEXT.sub(_as_text, text)) != text:
        text = plain
    text = text.replace("\\\x00", r"\text")
    text = _CONNECTIVE.sub(",", text)
    text = _BARE_FUNCTION.sub(lambda match: "\\" + _INVERSE.get(match[1], match[1]) + " ", text)
    text = _braced_exponents(_braced_arguments(text))
    text = re.sub(r"\s+", " ", text).strip()
    while (shorter := re.sub(r"(?:\\+|(?<!\\ldots)[.,;:])$", "", text).strip()) != text:
        text = shorter
    return _without_outer_braces(text)


def _as_text(match: re.Match) -> str:
    """What a font command shows: mathematics in another font, the name of an operator, or words."""
    shown = re.sub(r"\s+", " ", match[1])
    if shown.strip() in _SHORT_UNITS and re.search(r"[\d})]\s*$", match.string[: match.start()]):
        return "\\\x00{" + shown + "}"
    if re.fullmatch(r" ?[A-Za-z] ?|[\d\s.,/+=^()-]*", shown):
        return " " + shown.strip() + " "
    if shown.strip() in _OPERATORS:
        return "\\" + shown.strip() + " "
    return "\\\x00{" + shown + "}"  # marked, so that it is not found again


def _braced_arguments(text: str) -> str:
    r"""`\frac12`, `\frac 1 2`, `\sqrt3` and `\sqrt(3)` with braces."""
    pieces: list[str] = []
    position = 0
    for match in re.finditer(r"\\(frac|binom|sqrt)(?![A-Za-z])\s*(\[[^\]]*\])?", text):
        if match.start() < position:
            continue
        pieces.append(text[position : match.start()])
        arguments, position = _arguments(text, match.end(), 1 if match[1] == "sqrt" else 2)
        pieces.append("\\" + match[1] + (match[2] or "") + "".join("{" + a + "}" for a in arguments))
    pieces.append(text[position:])
    return "".join(pieces)


def _braced_exponents(text: str) -> str:
    """`2^(n+1)` with braces; what follows the bracket stays outside."""
    while (start := text.find("^(")) >= 0 and (end := closing(text, start + 1)) is not None:
        text = f"{text[: start + 1]}{{{text[start + 2 : end]}}}{text[end + 1 :]}"
    return text


def _arguments(text: str, position: int, count: int) -> tuple[list[str], int]:
    found = []
    for _ in range(count):
        while text[position : position + 1] == " ":
            position += 1
        if text[position : position + 1] in ("{", "("):
            if count == 2 and text[position] == "(":
                break
            end = closing(text, position)
            if end is None:
                break
            found.append(_braced_arguments(text[position + 1 : end]))
            position = end + 1
        elif match := re.compile(r"\\[A-Za-z]+|[^\\{}\s]").match(text, position):
            found.append(match[0])
            position = match.end()
        else:
            break
    return found, position


_OPENING, _CLOSING = "([{", ")]}"


def closing(text: str, start: int) -> int | None:
    """Where the bracket that opens at `start` closes; the kinds of brackets may differ, as in `[0, 1)`."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] in _OPENING:
            depth += 1
        elif text[position] in _CLOSING:
            depth -= 1
            if depth == 0:
                return position
    return None


def _without_outer_braces(text: str) -> str:
    while text.startswith("{") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def split(text: str, separator: str) -> list[str]:
    """Parts between the matches of a regular expression that stand outside all brackets.

    The matches themselves stand between the parts where `separator` has a group, as in `re.split`.
    """
    pattern = re.compile(separator)
    parts, start, position, depth = [], 0, 0, 0
    while position < len(text):
        character = text[position]
        if depth == 0 and (match := pattern.match(text, position)) and match.end() > position:
            parts += [text[start:position], *match.groups()]
            start = position = match.end()
            continue
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "\\" and text[position + 1 : position + 2].isalpha():
            position += 1  # so that no separator is found inside the name of a command
            while text[position + 1 : position + 2].isalpha():
                position += 1
        position += 1
    return [part.strip() for part in [*parts, text[start:]]]


def squeezed(text: str) -> str:
    """Without white space, but for one blank between a command and the letter after it."""
    return re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])|\s+", lambda match: f"{match[1]} " if match[1] else "", text)
