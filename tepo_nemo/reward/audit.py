"""What the grader says of answers whose verdicts are known: `tepo-nemo grade`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tepo_nemo.errors import UserError
from tepo_nemo.reward.pool import PoolSettings, RewardPool
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.runs.files import read_json_lines

_FORMS = {
    "answer": "tepo_nemo.reward.math_answer.grade_final_answer",
    "response": "tepo_nemo.reward.math_answer.math_answer",
}
_SHOWN = 100  # characters of a gold or an answer on a line


@dataclass(frozen=True)
class Row:
    """One line of a file of graded pairs."""

    line: int
    gold: str
    response: str
    form: str
    expected: bool | None = None
    timeout_ok: bool = False
    metadata: dict = field(default_factory=dict)

    def agrees(self, result: RewardResult) -> bool:
        """Whether a verdict is the expected one."""
        if result.failed:
            return result.status == "timeout" and self.timeout_ok
        return bool(result.value) == self.expected


def audit(path: Path, settings: PoolSettings) -> Iterator[str]:
    """Yields a line for every row, one for every disagreement, and last `agreement N / M`.

    Raises:
        UserError: the file cannot be read, or a line has not the fields of a row; before anything is graded.
    """
    rows = read_rows(path)
    results = _grade(rows, settings)
    for row, result in zip(rows, results, strict=True):
        verdict = "right" if result.value and not result.failed else "wrong"
        yield f"{row.line}  {verdict}  {result.status}  {_short(row.gold)}  {_short(result.extracted)}"
    known = [(row, result) for row, result in zip(rows, results, strict=True) if row.expected is not None]
    wrong = [(row, result) for row, result in known if not row.agrees(result)]
    for row, result in wrong:
        yield (
            f"disagreement {row.line}: expected {'right' if row.expected else 'wrong'}, "
            f"status {result.status}, gold {_short(row.gold)}, response {_short(row.response)}"
        )
    yield f"agreement {len(known) - len(wrong)} / {len(known)}"


def read_rows(path: Path) -> list[Row]:
    """Reads a file of graded pairs. Raises UserError as `audit`; names the line."""
    rows = [_row(fields, number, f"{path}:{number}") for number, fields in read_json_lines(path)]
    if not rows:
        raise UserError(f"{path}: has no rows; write one JSON object a line")
    return rows


def _row(fields: dict, number: int, place: str) -> Row:
    for name in ("gold", "response", "form"):
        if name not in fields:
            raise UserError(f"{place}: has no field {name!r}; every line needs gold, response, form")
        if not isinstance(fields[name], str):
            raise UserError(f"{place}: {name!r} is {fields[name]!r:.100}; it must be a string")
    if not fields["gold"].strip():
        raise UserError(f"{place}: 'gold' is empty; give the right answer")
    if fields["form"] not in _FORMS:
        raise UserError(f"{place}: 'form' is {fields['form']!r:.100}; it must be one of {', '.join(_FORMS)}")
    for name in ("expected", "timeout_ok"):
        if not isinstance(fields.get(name), bool | None):
            raise UserError(f"{place}: {name!r} is {fields[name]!r:.100}; it must be true or false")
    if not isinstance(fields.get("metadata", {}), dict):
        raise UserError(f"{place}: 'metadata' is {fields['metadata']!r:.100}; it must be a JSON object")
    return Row(
        line=number,
        gold=fields["gold"],
        response=fields["response"],
        form=fields["form"],
        expected=fields.get("expected"),
        timeout_ok=bool(fields.get("timeout_ok")),
        metadata=fields.get("metadata", {}),
    )


def _grade(rows: Sequence[Row], settings: PoolSettings) -> list[RewardResult]:
    results: dict[int, RewardResult] = {}
    for form, reward in _FORMS.items():
        chosen = [row for row in rows if row.form == form]
        if not chosen:
            continue
        pool = RewardPool(reward, settings)
        try:
            graded = pool.grade([("", row.response, row.gold, row.metadata) for row in chosen])
        finally:
            pool.close()
        results |= {row.line: result for row, result in zip(chosen, graded, strict=True)}
    return [results[row.line] for row in rows]


def _short(text: str | None) -> str:
    """One line of printable ASCII, whatever it is."""
    if text is None:
        return "-"
    shown = ascii(" ".join(text.split()))[1:-1].replace("\\\\", "\\")
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
