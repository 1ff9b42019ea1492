"""The main table as a picture: time and peak memory of every implementation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tepo_nemo.bench.bounds import peak_bytes

_COLORS = ("#2563a8", "#d1622b", "#3b8a54")


def draw(cell: Mapping[str, Any], path: Path) -> None:
    figure = Figure(figsize=(11, 1.2 + 0.55 * len(cell["implementations"])), layout="constrained")
    figure.suptitle(
        f"Log-prob and entropy, TP {cell['tensor_parallel']}, V {cell['vocab_size']}, N {cell['tokens']}",
        fontsize=11,
        color="#555555",
    )
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, cell, "Time", "times ours, median and 95 % interval", _ratio)
    _bars(right, cell, "Peak memory beyond the inputs", "MB", lambda figures: _peak(cell, figures))
    left.invert_yaxis()
    left.axvline(1, color="#555555", linewidth=0.8)
    right.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _ratio(figures: Mapping[str, Any]) -> tuple[float, float, float]:
    time = figures["time"]
    value = time.get("ratio", 1.0)  # ours is what the others are compared with
    return value, value - time.get("ratio_low", value), time.get("ratio_high", value) - value


def _peak(cell: Mapping[str, Any], figures: Mapping[str, Any]) -> tuple[float, float, float]:
    """The larger of both figures: what operators hide, or what the allocator adds."""
    process = figures.get("peak_process_bytes", {}).get(str(cell["tokens"]), 0)
    return max(process, peak_bytes(cell, figures) or 0) / 1e6, 0.0, 0.0


def _bars(axes: Axes, cell: Mapping[str, Any], title: str, unit: str, value_of: Any) -> None:
    names = list(cell["implementations"])
    modes = list(dict.fromkeys(mode for row in cell["implementations"].values() for mode in row["modes"]))
    height = 0.8 / len(modes)
    for index, (mode, color) in enumerate(zip(modes, _COLORS, strict=True)):
        places = [place for place, name in enumerate(names) if mode in cell["implementations"][name]["modes"]]
        values = np.array(
            [value_of(cell["implementations"][names[place]]["modes"][mode]) for place in places]
        )
        positions = np.array(places) + (index - (len(modes) - 1) / 2) * height
        axes.barh(positions, values[:, 0], height, xerr=np.abs(values[:, 1:].T), color=color, label=mode)
        for position, value in zip(positions, values[:, 0], strict=True):
            axes.text(value, position, f" {value:.3g}", va="center", fontsize=6)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(unit, fontsize=9)
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
