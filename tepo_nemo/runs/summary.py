"""`summary.json`: what came out of a run, in a few fields for scripts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tepo_nemo.runs.files import to_json, write_atomic


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
