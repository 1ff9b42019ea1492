"""What the first steps on new hardware have shown, one verdict a line; slurm/smoke.sbatch asks for it."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.config.load import read_yaml
from tepo_nemo.errors import UserError
from tepo_nemo.launch.outcome import ExitCode, print_error
from tepo_nemo.runs.checkpoints import CheckpointFolder, Position
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import read_metrics

_LARGEST_GAP = 0.1  # nats; rounding to bf16 stays far below, a lost bias or another rotary base is far above


@dataclass(frozen=True)
class Verdict:
    """One line."""

    name: str
    good: bool
    found: str

    def __str__(self) -> str:
        return f"{'ok' if self.good else 'PROBLEM':8s}{self.name:16s}{self.found}"


def main() -> int:
    """`python -m tepo_nemo.launch.smoke RUN STEPS`: exit code 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="tepo_nemo.launch.smoke", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("steps", type=int, help="how many steps it should have")
    arguments = parser.parse_args()
    run = RunDirectory(arguments.run)
    try:
        rows, engine = read_metrics(run.metrics), read_yaml(run.config).rollout.backend
    except UserError as mistake:
        print_error(mistake)
        return ExitCode.MISTAKE
    verdicts = [
        *judge_engine(engine, len(rows)),
        *judge_steps(rows, arguments.steps),
        judge_checkpoint(CheckpointFolder(run.checkpoints).complete(), arguments.steps),
    ]
    print(*verdicts, sep="\n")
    return ExitCode.DONE if all(verdict.good for verdict in verdicts) else ExitCode.FAILED


def judge_engine(engine: str, steps: int) -> list[Verdict]:
    """By the steps that training has let it make: it looks for itself, and ends before a step otherwise."""
    if engine == "megatron":  # has no weights of its own
        return []
    return [
        Verdict("engine", steps >= 1, f"{engine} built, with the model's names of weights"),
        Verdict("refit", steps >= 2, "answers change with the weights"),
    ]


def judge_steps(rows: Sequence[Mapping[str, float]], steps: int) -> list[Verdict]:
    """Of the rows of metrics.jsonl of a run that should have made `steps` steps."""
    made = [int(row["step"]) for row in rows]
    gap = rows[0].get("rollout/logprob_gap_mean", math.nan) if rows else math.nan
    numbers = [row[key] for row in rows for key in ("loss", "grad_norm")]
    skipped = sum(int(row["update/skipped"]) for row in rows)
    return [
        Verdict("steps", made == list(range(1, steps + 1)), f"made {made}, wanted 1 to {steps}"),
        # Under the weights that the run started from: sampler and trainer are the same model.
        Verdict("log-probs", gap <= _LARGEST_GAP, f"mean gap {gap:.2g} nats, at most {_LARGEST_GAP:g}"),
        Verdict(
            "updates",
            skipped == 0 and all(map(math.isfinite, numbers)) and any(row["grad_norm"] > 0 for row in rows),
            f"{skipped} skipped, gradient norms {', '.join(format(row['grad_norm'], '.3g') for row in rows)}",
        ),
    ]


def judge_checkpoint(complete: Mapping[Position, object], step: int) -> Verdict:
    """Of the complete checkpoints of the run; `step` is where the last one should be."""
    found = ", ".join(position.name for position in complete)
    return Verdict("checkpoint", Position(step) in complete, f"complete: {found or 'none'}")


if __name__ == "__main__":
    raise SystemExit(main())
