"""What a person sees of a run: one line a step, and a progress bar where stdout is a terminal."""

import sys
from collections.abc import Mapping
from typing import TextIO

import rich.console
from rich import progress
from rich.text import Text

from tepo_nemo.runs.metrics import EVALUATION_PREFIX

# metric -> name and format in the line; fixed widths keep the columns of a log file aligned
_FIELDS = {
    "reward/mean": ("reward", "{:5.3f}"),
    "entropy/mean": ("entropy", "{:5.3f}"),
    "ratio/clip_fraction": ("clip", "{:5.3f}"),
    "kl/mean": ("kl", "{:7.1e}"),
    "mask/fraction": ("mask", "{:4.2f}"),
    "grad_norm": ("gradnorm", "{:5.2f}"),
    "response_length/mean": ("len", "{:5.1f}"),
}
TOLD_TRUNCATION = 0.1  # a share of cut responses from which on the line says so: they can hardly be right
_PHASES = {"time/rollout_s": "rollout", "time/old_stats_s": "old", "time/train_s": "train"}


def format_step(metrics: Mapping[str, float | int], max_steps: int) -> str:
    """One line for one step; a metric that the step lacks is left out.

    Example: `step 12/72  reward 0.412  entropy 0.830  ...  1.02 s (rollout 0.41 old 0.10 train 0.46)`.
    """
    parts = [f"step {metrics['step']:{len(str(max_steps))}d}/{max_steps}"]
    for key, (name, form) in _FIELDS.items():
        if key in metrics:
            parts.append(f"{name} {form.format(metrics[key])}")
    if "time/step_s" in metrics:
        phases = " ".join(f"{name} {metrics[key]:.2f}" for key, name in _PHASES.items() if key in metrics)
        parts.append(f"{metrics['time/step_s']:.2f} s" + (f" ({phases})" if phases else ""))
    if metrics.get("update/skipped"):
        parts.append(f"skipped {metrics['update/skipped']}")
    if metrics.get("response_length/truncated_fraction", 0) > TOLD_TRUNCATION:
        parts.append(f"truncated {metrics['response_length/truncated_fraction']:.0%}")
    parts += [f"{key} {value:.3f}" for key, value in metrics.items() if key.startswith(EVALUATION_PREFIX)]
    return "  ".join(parts)


class _Output(rich.console.Console):
    def on_broken_pipe(self) -> None:
        """Whoever read is gone: print no more. The run goes on, where rich would end the process."""
        self.quiet = True


class Console:
    """Prints the lines of a run; from the first step on it shows a bar where the stream is a terminal."""

    def __init__(self, max_steps: int, stream: TextIO | None = None):
        stream = stream or sys.stdout
        # The stream alone decides: variables that force colours must not put escape codes into a log file.
        terminal = stream.isatty()
        self._max_steps = max_steps
        self._rich = _Output(file=stream, force_terminal=terminal)
        self._progress = progress.Progress(
            progress.TextColumn("training"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=self._rich,
            transient=True,
            disable=not terminal,
        )
        self._bar = self._progress.add_task("steps", total=max_steps)

    def step_line(self, metrics: Mapping[str, float | int]) -> None:
        """Prints the line of one step and moves the bar to it."""
        line = Text(format_step(metrics, self._max_steps))
        line.highlight_regex(r"^step +\S+", "bold")
        line.highlight_regex(r"reward +\S+", "green")
        line.highlight_regex(r"(skipped|truncated) \d+%?", "bold red")
        self._progress.start()
        self._print(line)
        self._progress.update(self._bar, completed=metrics["step"])

    def message(self, text: str) -> None:
        """Prints a line that belongs to no step."""
        self._print(Text(text))

    def close(self) -> None:
        """Takes the bar away, and gives the terminal its cursor back."""
        self._progress.stop()

    def _print(self, text: Text) -> None:
        self._rich.print(text, soft_wrap=True)  # in one piece whatever the width, and flushed
