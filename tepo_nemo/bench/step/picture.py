"""Where the seconds of a step go, as a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLORS = {"generation": "#2563a8", "statistics": "#3b8a54", "training": "#d1622b", "other": "#888888"}


def draw(cases: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One panel a case whose steps were compared with another trainer's."""
    compared = [case for case in cases.values() if case["aligner"] and case["rounds"]]
    bars = [len(case["rows"]) for case in compared]
    figure = Figure(figsize=(9, 1.2 * len(bars) + 0.3 * sum(bars)), layout="constrained")
    panels = figure.subplots(len(bars), 1, squeeze=False, height_ratios=bars)[:, 0]
    for axes, case in zip(panels, compared, strict=True):
        _panel(axes, case)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, case: Mapping[str, Any]) -> None:
    rows = case["rows"]
    labels = [f"without: {name}" if name in case["levers"] else name for name in rows]
    starts = [0.0] * len(rows)
    for category, color in _COLORS.items():
        widths = [row["seconds"][category] for row in rows.values()]
        axes.barh(labels, widths, 0.7, left=starts, color=color, label=category)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for place, row in enumerate(rows.values()):
        axes.text(starts[place], place, f" {row['tokens_per_second']:,.0f} tokens/s", va="center", fontsize=7)
    work = case["workload"]
    axes.set_title(f"{work['model']}, {work['lengths']} lengths, TP {work['tensor']}", fontsize=11)
    axes.set_xlabel("seconds a step", fontsize=9)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
