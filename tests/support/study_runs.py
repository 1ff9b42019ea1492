"""Study files, and finished runs that no training has made."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tepo_nemo.config.load import dump_config
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.summary import write_summary
from tepo_nemo.study.plan import Cell

STUDY = {
    "name": "a study",
    "seeds": [1, 2],
    "reward_threshold": 0.5,
    "window": 2,
    "experiments": [{"label": "TEPO"}, {"label": "GRPO/DAPO", "overrides": ["algorithm=grpo_dapo"]}],
}


def write_study(path: Path, **changes: object) -> Path:
    """A study file: `STUDY` with some keys changed."""
    path.write_text(yaml.safe_dump(STUDY | changes, allow_unicode=True))
    return path


def finish(
    cell: Cell,
    rewards: Sequence[float],
    *,
    after: Mapping[str, float] | None = None,
    **columns: Sequence[float],
) -> None:
    """What a run of this cell leaves that had these rewards; other metrics with `__` for `/`."""
    run = RunDirectory.create(cell.config.output, dump_config(cell.config))
    rows = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, start=1)]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name.replace("__", "/")] = value
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_summary(
        run.summary,
        steps=len(rewards),
        reward_first=rewards[0],
        reward_last=rewards[-1],
        eval_before={name: 0.25 for name in after or ()},
        eval_after=after,
        wall_s=60.0,
        status="done",
    )
