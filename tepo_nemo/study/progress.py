"""What a person sees of a study: a line for each cell that ends, and bars where stdout is a terminal."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import rich.console
from rich import progress
from rich.text import Text

from tepo_nemo.study.plan import Cell

_LOOK_S = 1.0  # between two looks at the metrics of the running cells


class StudyProgress:
    """Follows the cells that one call runs.

    Args:
        cells: that will run, in all.
        finished: cells of the study that have been run before.
        stream: where a person reads.
    """

    def __init__(self, cells: Sequence[Cell], finished: int, stream: TextIO) -> None:
        terminal = stream.isatty()
        self._rich = rich.console.Console(file=stream, force_terminal=terminal)
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=self._rich,
            transient=True,
            disable=not terminal,
        )
        self._total = finished + len(cells)
        self._before = finished
        self._steps_left = {cell: cell.config.trainer.max_steps for cell in cells}
        self._steps_done = 0.0
        self._ended = 0
        self._bars: dict[Cell, progress.TaskID] = {}
        self._started: dict[Cell, float] = {}
        self._begin = self._looked = time.monotonic()
        self._bar = self._progress.add_task("cells", total=self._total, completed=finished, note="")
        self._progress.start()

    def started(self, cell: Cell) -> None:
        """A cell runs now."""
        self._started[cell] = time.monotonic()
        self._bars[cell] = self._progress.add_task(cell.name, total=cell.config.trainer.max_steps, note="")

    def ended(self, cell: Cell, failure: str | None) -> None:
        """A cell has ended, with what made it fail, or None. Prints its line."""
        self._ended += 1
        self._steps_done += self._steps_left.pop(cell)
        self._progress.remove_task(self._bars.pop(cell))
        seconds = time.monotonic() - self._started.pop(cell)
        self._show_count()
        count = f"{self._before + self._ended:{len(str(self._total))}d}/{self._total}"
        text = f"cell {count}  {cell.name}  "
        if failure is None:
            text += f"{_reward(last_step(cell.run.metrics))}  {seconds:.0f} s{self._time_left()}"
        else:
            text += f"FAILED after {seconds:.0f} s: {failure}"
        line = Text(text)
        line.highlight_regex(r"FAILED", "bold red")
        self._rich.print(line, soft_wrap=True)

    def look(self) -> None:
        """Move the bars to where the running cells are."""
        if self._progress.disable or time.monotonic() < self._looked + _LOOK_S:
            return
        self._looked = time.monotonic()
        for cell, bar in self._bars.items():
            metrics = last_step(cell.run.metrics)
            self._progress.update(bar, completed=metrics.get("step", 0), note=_reward(metrics))
        self._show_count()

    def close(self) -> None:
        """Take the bars away."""
        self._progress.stop()

    def _show_count(self) -> None:
        ended = self._before + self._ended
        note = f"{ended}/{self._total}{self._time_left()}"
        self._progress.update(self._bar, completed=ended, note=note)

    def _time_left(self) -> str:
        """By the steps that have been made and those that are left."""
        running = sum(last_step(cell.run.metrics).get("step", 0) for cell in self._bars)
        done = self._steps_done + running
        left = sum(self._steps_left.values()) - running
        if not done or not left:
            return ""
        seconds = (time.monotonic() - self._begin) * left / done
        return f"  ({seconds:.0f} s left)" if seconds < 60 else f"  ({seconds / 60:.0f} min left)"


def last_step(metrics: Path) -> dict[str, float]:
    """The last whole line of a file that somebody is writing; empty where there is none."""
    if not metrics.exists():
        return {}
    rows = metrics.read_bytes()
    end = rows.rfind(b"\n")
    return json.loads(rows[rows.rfind(b"\n", 0, end) + 1 : end]) if end > 0 else {}


def _reward(metrics: dict[str, float]) -> str:
    reward = metrics.get("reward/mean")
    return "" if reward is None else f"reward {reward:.3f}"
