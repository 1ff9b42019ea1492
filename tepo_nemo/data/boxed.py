"""The last `\\boxed{...}` of a worked solution or of a response."""

import re

_BOX = re.compile(r"\\f?boxed(?![A-Za-z])\s*")


def last_box(response: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fboxed{...}`) of a response.

    An earlier box is never taken: None where the last one is not closed, or where there is none. Escaped
    braces (`\{`) do not count. A box without braces (`\boxed 7`) holds one character, as TeX reads it.
    """
    boxes = list(_BOX.finditer(response))
    if not boxes:
        return None
    start = boxes[-1].end()
    if response[start : start + 1] != "{":
        return response[start : start + 1] or None
    depth, position = 0, start
    while position < len(response):
        character = response[position]
        if character == "\\":
            position += 1  # whatever it escapes
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return response[start + 1 : position]
        position += 1
    return None
