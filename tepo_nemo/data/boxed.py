"""The last `\\boxed{...}` of a worked solution."""

import re

_BOX = re.compile(r"\\boxed\s*\{")


def last_boxed(text: str) -> str | None:
    """What stands in the last box; None without a box, or where the last one is never closed."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 1
    for place in range(start, len(text)):
        if text[place] in "{}" and not _escaped(text, place):
            depth += 1 if text[place] == "{" else -1
        if depth == 0:
            return text[start:place]
    return None


def _escaped(text: str, place: int) -> bool:
    """Whether an odd number of backslashes stands in front."""
    return (place - len(text[:place].rstrip("\\"))) % 2 == 1
