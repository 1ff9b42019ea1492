"""The figures of a study: a line for each experiment, the mean over its seeds, in a band of its interval."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from tepo_nemo.runs.plots import COLORS, LEGEND, running_mean, style_axes, title_and_unit
from tepo_nemo.study.results import Results
from tepo_nemo.study.schema import Figure
from tepo_nemo.study.statistics import mean_band

_LEGEND_COLUMNS = 4
_LINES = ("-", "--", ":")  # colours come again with another line


def draw(figure: Figure, results: Results, path: Path) -> None:
    """One panel a metric. Every run is smoothed by itself, as in the pictures of a run, before the mean."""
    width = min(len(figure.metrics), 4)
    height = -(-len(figure.metrics) // width)
    room = 0.3 + 0.2 * -(-len(figure.labels) // _LEGEND_COLUMNS)  # for the title and the legend
    picture = Picture(figsize=(4.6 * width, 3.3 * height + room), layout="constrained")
    picture.suptitle(figure.title, fontsize=11, color="#555555")
    for index, metric in enumerate(figure.metrics):
        axes = picture.add_subplot(height, width, index + 1)
        for line, label in enumerate(figure.labels):
            _draw_mean(axes, results.curves(label, metric), label, line)
        axes.ticklabel_format(axis="y", scilimits=(-3, 5))
        style_axes(axes, *title_and_unit(metric))
    lines = {str(line.get_label()): line for axes in picture.axes for line in axes.lines}
    picture.legend(
        list(lines.values()), list(lines), loc="outside lower center", ncols=_LEGEND_COLUMNS, **LEGEND
    )
    picture.savefig(path, dpi=130)


def _draw_mean(axes: Axes, curves: np.ndarray, label: str, line: int) -> None:
    if not np.isfinite(curves).any():
        return
    smooth = np.array([running_mean(curve) for curve in curves])
    steps = np.arange(1, curves.shape[1] + 1)
    present = np.isfinite(smooth).any(axis=0)
    mean = np.full(len(steps), np.nan)
    mean[present] = np.nanmean(smooth[:, present], axis=0)
    color, style = COLORS[line % len(COLORS)], _LINES[line // len(COLORS) % len(_LINES)]
    axes.plot(steps, mean, style, color=color, linewidth=1.8, label=f"{label} ({len(curves)})")
    low, high = mean_band(smooth)
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
