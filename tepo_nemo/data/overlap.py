"""Which problems of one prompt set also occur in another: an evaluation set in a training set, for instance.

A text is compared by its runs of 13 words: letters and digits of any script, lower case, without the commands
of LaTeX. A problem overlaps when at least half of its distinct runs occur somewhere in the other set, in one
problem or in several. A problem of fewer than 13 words overlaps when the other set has the same text, white
space aside.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tepo_nemo.data.problems import one_spaced
from tepo_nemo.data.prompts import Prompt

RUN = 13  # words
SHARE = 0.5  # of a problem's runs, from which on it overlaps

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Overlap:
    """A problem that also occurs in the other set."""

    id: str
    other_id: str  # the problem of the other set that shares most with it
    covered: float  # share of its runs that occur in the other set
    covered_by_other: float  # share of its runs that occur in that one problem
    same_gold: bool  # whether that problem has the same gold, as text


def find_overlap(problems: Sequence[Prompt], others: Sequence[Prompt]) -> list[Overlap]:
    """The problems of a set that overlap with another set, in their order."""
    runs_of = {prompt.id: _runs(problem_text(prompt)) for prompt in problems}
    owners = defaultdict(list)  # run -> the problems that have it
    for id, runs in runs_of.items():
        for run in runs:
            owners[run].append(id)
    found = set()  # runs that the other set has
    shared: dict[str, Counter[int]] = defaultdict(Counter)  # problem -> number of the other -> runs in common
    for number, other in enumerate(others):
        runs = [run for run in _runs(problem_text(other)) if run in owners]
        found.update(runs)
        for run in runs:
            for id in owners[run]:
                shared[id][number] += 1
    overlaps = []
    for prompt in problems:
        runs = runs_of[prompt.id]
        covered = len(runs & found) / len(runs)
        if covered >= SHARE:
            number, count = max(shared[prompt.id].items(), key=lambda item: (item[1], -item[0]))
            nearest = others[number]
            overlaps.append(
                Overlap(prompt.id, nearest.id, covered, count / len(runs), prompt.gold == nearest.gold)
            )
    return overlaps


def problem_text(prompt: Prompt) -> str:
    """The problem without what a template has put around it, where the set was prepared with one."""
    text = prompt.metadata.get("problem")
    return text if isinstance(text, str) else prompt.prompt


def _runs(text: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(_COMMAND.sub(" ", text).lower())
    if len(words) < RUN:
        return {(one_spaced(text),)}
    return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}
