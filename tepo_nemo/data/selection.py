"""Which rows of a published file become problems: repeats, contradictions and malformed rows, all counted."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tepo_nemo.data.problems import Malformed, Problem, one_spaced, to_problem
from tepo_nemo.data.rows import Row
from tepo_nemo.data.sources import Source
from tepo_nemo.errors import UserError


@dataclass
class Selection:
    """The problems of a file in the order of their first rows, and what became of every other row."""

    rows: int = 0
    malformed: list[dict] = field(default_factory=list)  # row, reason
    distinct: int = 0  # texts, once white space is normalised
    contradictory: list[dict] = field(default_factory=list)  # id, golds, rows: dropped
    repeated: list[dict] = field(default_factory=list)  # id, rows: dropped too, where the source says so
    repeats: int = 0  # rows that say what an earlier one has said
    problems: list[Problem] = field(default_factory=list)


@dataclass
class _Text:
    """All rows of one text."""

    problem: Problem
    first_row: dict[str, int]  # gold -> the first row that gives it
    rows: int = 1


def select(rows: Iterable[Row], source: Source, path: Path, *, skip_malformed: bool) -> Selection:
    """Sort the rows of a file.

    A text that occurs with two different golds is dropped, with all its rows. Of a text that occurs several
    times with one gold the first row is kept, or none where `source.keep_repeats` says so.

    Raises:
        UserError: two different texts have one id, or no problem is left; a malformed row, unless they are
            to be left out.
    """
    selection, texts, first_row = Selection(), {}, {}
    for row in rows:
        selection.rows += 1
        try:
            if row.fields is None:
                raise Malformed(row.reason)
            problem = to_problem(row.fields, row.number, source)
        except Malformed as reason:
            selection.malformed.append({"row": row.number, "reason": str(reason)})
            continue
        if source.id_field is not None:
            earlier = first_row.setdefault(problem.id, row.number)
            if earlier != row.number:
                raise UserError(
                    f"{path}:{row.number}: id {problem.id!r} is that of row {earlier}; give each its own"
                )
        _take(problem, row.number, texts)
    if selection.malformed and not skip_malformed:
        first, others = selection.malformed[0], len(selection.malformed) - 1
        raise UserError(
            f"{path}:{first['row']}: {first['reason']}"
            + (f" ({others} further rows are malformed)" if others else "")
            + "; repair the file, or leave such rows out and have them listed with --skip-malformed"
        )
    _settle(texts.values(), source, selection)
    if not selection.problems:
        raise UserError(f"{path}: has no problem that can be used; is {source.name} the right source?")
    return selection


def _take(problem: Problem, number: int, texts: dict[str, _Text]) -> None:
    key = one_spaced(problem.text)
    seen = texts.get(key)
    if seen is None:
        texts[key] = _Text(problem, {problem.gold: number})
    else:
        seen.rows += 1
        seen.first_row.setdefault(problem.gold, number)


def _settle(texts: Iterable[_Text], source: Source, selection: Selection) -> None:
    for text in texts:
        selection.distinct += 1
        selection.repeats += text.rows - 1
        entry = {"id": text.problem.id, "rows": text.rows}
        if len(text.first_row) > 1:
            golds = [{"gold": gold, "row": row} for gold, row in text.first_row.items()]
            selection.contradictory.append(entry | {"golds": golds})
        elif text.rows > 1 and source.keep_repeats == "none":
            selection.repeated.append(entry)
        else:
            selection.problems.append(text.problem)
