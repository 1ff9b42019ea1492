"""`metrics.jsonl`: one JSON object a step, each step once, every key in one table with its denominator."""

import contextlib
import math
import numbers
import os
from collections.abc import Mapping
from pathlib import Path

from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import read_json_lines, to_json, write_atomic

# "Trained tokens" are the response tokens under the loss mask: the stop token counts; prompts, padding and
# responses that could not be graded do not. A mean over updates weighs each update of the step alike.
METRICS: dict[str, str] = {
    "step": "number of the step; the first is 1",
    "consumed_prompts": "prompts taken from the prompt order since the run began, dropped ones included",
    "reward/mean": "rewards of the responses with a verdict / those responses, of all generated",
    "reward/group_std_zero_fraction": "groups whose graded rewards are all equal / groups generated",
    "response_length/mean": "response tokens, the stop token included / responses generated",
    "response_length/truncated_fraction": "responses cut at the limit, no stop token / responses generated",
    "entropy/mean": "full-vocabulary entropy in nats, weights before their update / trained tokens",
    "entropy/delta_mean": "that entropy minus the one at the rollout, in nats / trained tokens",
    "ratio/mean": "importance ratio (its response's where the method has one a response) / trained tokens",
    "ratio/clip_fraction": "tokens whose surrogate lost its gradient to the clip / trained tokens",
    "kl/mean": "estimate of the KL to the rollout policy in nats / trained tokens",
    "kl/masked_mean": "that estimate, summed over the tokens that the KL mask selects / those tokens",
    "kl/reference_mean": "estimate of the KL to the reference policy in nats / trained tokens",
    "mask/fraction": "tokens that the KL mask selects / trained tokens",
    "loss": "loss of a mini-batch with the method's denominator, mean over the updates of the step",
    "grad_norm": "L2 norm of the whole gradient before clipping, mean over the updates of the step",
    "lr": "learning rate of the last update of the step",
    "verifier/failed_fraction": "responses whose grading ended in timeout or error / responses generated",
    "rollout/logprob_gap_mean": "|log-prob told by the rollout - recomputed one| in nats / trained tokens",
    "rollout/logprob_error_mean": "exp of that difference, 1 where there is none / trained tokens",
    "rollout/weight_mean": "weights of the rollout correction / trained tokens",
    "rollout/dropped_fraction": "tokens to which that correction gives weight 0 / trained tokens",
    "rollout/invalid_fraction": "responses with a token that the model does not have / responses generated",
    "tokens/trained": "number of trained tokens in the updates of the step",
    "tokens/padding_fraction": "positions of padding / positions computed in the updates of the step",
    "time/rollout_s": "seconds of generation, all generation batches of the step",
    "time/old_stats_s": "seconds of forward-only passes and of what is made of them before the updates",
    "time/reference_s": "seconds of the pass under the reference policy, swapping of weights included",
    "time/train_s": "seconds of all updates of the step, optimizer included",
    "time/step_s": "seconds of the whole step",
    "checkpoint/failed_saves": "number of checkpoints that could not be written, since the run began",
    "update/skipped": "updates of the step not made: no groups to fill them, or one of the next two",
    "update/not_finite": "updates of the step skipped: loss, importance ratio or gradient norm not finite",
    "update/spikes": "updates of the step skipped: gradient norm above spike_factor x its rolling median",
    "update/rewinds": "times that a spike has sent the run back to a checkpoint, since it began",
}
EVALUATION_PREFIX = "eval/"  # eval/<benchmark>: avg@k as a fraction, mean over samples, then over problems
OWN_PREFIX = "objective/"  # what an objective from outside this package measures beside the common ones


class MetricsWriter:
    """Appends steps to a metrics file, also to that of an earlier run that is resumed.

    A step at or before the last one in the file replaces it and everything after it: that is what a run
    does which resumes from an older checkpoint. A last line that a killed run left incomplete is dropped.
    """

    def __init__(self, path: Path):
        self._path = path
        self._last_step = -1
        if path.exists():
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):
                with open(path, "r+b") as file:
                    file.truncate(content.rfind(b"\n") + 1)
            self._last_step = max((int(row["step"]) for row in read_metrics(path)), default=-1)

    def keep_until(self, step: int) -> list[dict[str, float]]:
        """Drop the steps after `step`; the rows that are left."""
        if self._last_step > step:
            self._keep_steps_before(step + 1)
            self._last_step = step
        return read_metrics(self._path) if self._path.exists() else []

    def write(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Writes one step as one line and flushes it; NaN and infinities are written as null.

        Raises:
            KeyError: a key is neither in `METRICS` nor under `eval/` or `objective/`.
            TypeError: a value is not a number (a tensor needs `.item()` first).
            OSError: the file cannot be written; it is as it was before.
        """
        for key, value in metrics.items():
            if key not in METRICS and not key.startswith((EVALUATION_PREFIX, OWN_PREFIX)):
                raise KeyError(f"metric {key!r} is not in METRICS; call your own metrics {OWN_PREFIX}NAME")
            if not isinstance(value, numbers.Real):
                raise TypeError(f"metric {key!r} is {type(value).__name__}, not a number")
        if step <= self._last_step:
            self._keep_steps_before(step)
        row = {key: int(v) if isinstance(v, numbers.Integral) else float(v) for key, v in metrics.items()}
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(to_json({"step": step, **row}) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a checkpoint of the step is on the disk too, and relies on its line
        except OSError:
            self._cut_to(size)
            raise
        self._last_step = step

    def _cut_to(self, size: int) -> None:
        """Take half a line away, that the next one may begin on a line of its own."""
        with contextlib.suppress(OSError):  # the file is as it was, or the next try fails too
            os.truncate(self._path, size)

    def _keep_steps_before(self, step: int) -> None:
        kept = [row for _, row in read_json_lines(self._path) if row["step"] < step]
        write_atomic(self._path, "".join(to_json(row) + "\n" for row in kept))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """All steps of a metrics file in order; null, which stands for a non-finite value, is read as NaN.

    Raises:
        UserError: no such file, a broken line, a value that is not a number, or steps that do not rise;
            names the file and the line.
    """
    rows: list[dict[str, float]] = []
    for number, fields in read_json_lines(path):
        row = {key: math.nan if value is None else value for key, value in fields.items()}
        for key, value in row.items():
            if not isinstance(value, (int, float)):
                raise UserError(f"{path}:{number}: {key} is {value!r}, not a number; remove the line")
        if "step" not in row or (rows and not row["step"] > rows[-1]["step"]):
            raise UserError(f"{path}:{number}: step is {row.get('step')} and must rise; remove the line")
        rows.append(row)
    return rows
