"""`summary.json`: what came out of a run, in a few fields for scripts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import read_json_lines, to_json, write_atomic


def write_summary(
    path: Path,
    *,
    steps: int,
    reward_first: float | None,
    reward_last: float | None,
    eval_before: Mapping[str, float] | None,
    eval_after: Mapping[str, float] | None,
    wall_s: float,
    status: Literal["done", "stopped", "failed"],
) -> None:
    """Writes the summary as one step (a reader never sees half of it).

    Args:
        steps: steps that were completed.
        reward_first, reward_last: `reward/mean` of the first and of the last step; None before the first.
        eval_before, eval_after: benchmark -> avg@k as a fraction; None where it was not evaluated.
        wall_s: seconds from the start of the run to its end.
    """
    if status not in ("done", "stopped", "failed"):
        raise ValueError(f"status is {status!r}")
    write_atomic(
        path,
        to_json(
            {
                "steps": steps,
                "reward_first": reward_first,
                "reward_last": reward_last,
                "eval_before": eval_before,
                "eval_after": eval_after,
                "wall_s": wall_s,
                "status": status,
            }
        )
        + "\n",
    )


def read_summary(path: Path) -> dict[str, Any]:
    """The fields that `write_summary` wrote. Raises UserError where the file is absent or broken."""
    rows = [fields for _, fields in read_json_lines(path)]
    if len(rows) != 1 or "status" not in rows[0]:
        raise UserError(f"{path}: is no summary of a run; move the run away")
    return rows[0]
