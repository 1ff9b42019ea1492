"""Pictures of a run, drawn from its metrics file: one PNG a topic and an overview."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tepo_nemo.errors import UserError
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import EVALUATION_PREFIX, METRICS, read_metrics

COLORS = ("#2563a8", "#d1622b", "#3b8a54", "#8250b0", "#b8902a", "#c2417c")
_REST_COLOR = "#c3c7cd"
LEGEND = {"fontsize": 8, "frameon": False}

Columns = dict[str, np.ndarray]  # metric -> [steps], NaN where a step lacks it or it was not finite


def running_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the values around each one, a tenth of the run in all (3 to 51); NaN is left out."""
    side = min(max(len(values) // 20, 1), 25)
    padded = np.pad(values, side, constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * side + 1)
    present = np.isfinite(windows)
    counts = present.sum(axis=1)
    sums = np.where(present, windows, 0.0).sum(axis=1)
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def _draw_curves(axes: Axes, series: dict[str, str], columns: Columns) -> None:
    """Each step as a thin line, the running mean as a thick one."""
    for (key, label), color in zip(series.items(), COLORS, strict=False):
        if key in columns:
            steps, values = columns["step"], columns[key]
            axes.plot(steps, values, ".-", color=color, alpha=0.35, linewidth=0.8, markersize=2)
            axes.plot(steps, running_mean(values), color=color, linewidth=1.8, label=label)
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))
    if len(series) > 1:
        axes.legend(**LEGEND)


def _draw_points(axes: Axes, series: dict[str, str], columns: Columns) -> None:
    """Values that only a few steps have."""
    for index, (key, label) in enumerate(series.items()):
        present = np.isfinite(columns[key])
        steps, values = columns["step"][present], columns[key][present]
        axes.plot(steps, values, "o-", color=COLORS[index % len(COLORS)], markersize=4, label=label)
    axes.set_ylim(0, 1)
    axes.legend(**LEGEND)


def _draw_phases(axes: Axes, series: dict[str, str], columns: Columns) -> None:
    """Seconds of the phases on top of each other, and what the step took besides them."""
    none = np.zeros(len(columns["step"]))
    bottom = none
    for (key, label), color in zip(series.items(), COLORS, strict=False):
        seconds = np.nan_to_num(columns.get(key, none))
        axes.bar(columns["step"], seconds, bottom=bottom, width=1, color=color, alpha=0.85, label=label)
        bottom = bottom + seconds
    rest = np.clip(np.nan_to_num(columns.get("time/step_s", none)) - bottom, 0, None)
    axes.bar(columns["step"], rest, bottom=bottom, width=1, color=_REST_COLOR, label="rest")
    axes.margins(x=0.02, y=0.2)  # room for the legend above the bars
    axes.legend(loc="upper center", ncols=len(series) + 1, handlelength=0.9, columnspacing=0.9, **LEGEND)


@dataclass(frozen=True)
class Panel:
    """One pair of axes: its title, its unit, and the metrics in it with their labels."""

    title: str
    unit: str
    series: dict[str, str]
    draw: Callable[[Axes, dict[str, str], Columns], None] = _draw_curves


_TOPICS = {
    "reward": (
        Panel("Mean reward", "reward per response", {"reward/mean": "reward"}),
        Panel("Groups without spread", "share of groups", {"reward/group_std_zero_fraction": "groups"}),
    ),
    "entropy": (
        Panel("Entropy", "nats per token", {"entropy/mean": "entropy"}),
        Panel("Entropy change since the rollout", "nats per token", {"entropy/delta_mean": "change"}),
    ),
    "clip_fraction": (
        Panel("Clipped tokens", "share of trained tokens", {"ratio/clip_fraction": "clipped"}),
        Panel("Importance ratio", "mean over trained tokens", {"ratio/mean": "ratio"}),
    ),
    "kl_mask": (
        Panel("KL to the rollout policy", "nats per token", {"kl/mean": "all", "kl/masked_mean": "masked"}),
        Panel("Tokens under the KL mask", "share of trained tokens", {"mask/fraction": "masked"}),
    ),
    "grad_norm": (
        Panel("Gradient norm", "L2 norm before clipping", {"grad_norm": "norm"}),
        Panel("Loss", "mean over updates", {"loss": "loss"}),
    ),
    "response_length": (
        Panel("Response length", "tokens per response", {"response_length/mean": "length"}),
        Panel("Truncated responses", "share of responses", {"response_length/truncated_fraction": "cut"}),
    ),
    "time": (
        Panel(
            "Time of a step",
            "seconds",
            {"time/rollout_s": "rollout", "time/old_stats_s": "old statistics", "time/train_s": "updates"},
            _draw_phases,
        ),
    ),
}


def plot_run(run_dir: Path) -> list[Path]:
    """Draws `plots/<topic>.png` for every topic that the run has metrics of, and `plots/overview.png`.

    Returns: the files that were written, the overview first.

    Raises:
        UserError: the folder has no metrics.jsonl, or one without steps or with a broken line (names it).
    """
    run = RunDirectory(Path(run_dir))
    if not run.metrics.is_file():
        raise UserError(f"{run_dir}: has no metrics.jsonl; give the output folder of a run")
    columns = read_columns(run.metrics)
    topics = _topics_of(columns)
    run.plots.mkdir(exist_ok=True)
    pictures = {"overview": [panels[0] for panels in topics.values()], **topics}
    paths = []
    for topic, panels in pictures.items():
        figure = _draw(f"{run.path.resolve().name}: {topic.replace('_', ' ')}", panels, columns)
        paths.append(run.plots / f"{topic}.png")
        figure.savefig(paths[-1], dpi=130)
    return paths


def read_columns(path: Path) -> Columns:
    """The metrics of a run, step by step. Raises UserError where there are none, or a line is broken."""
    rows = read_metrics(path)
    if not rows:
        raise UserError(f"{path}: has no steps; plot the run after its first step")
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: np.array([row.get(key, np.nan) for row in rows], dtype=float) for key in keys}


def _topics_of(columns: Columns) -> dict[str, list[Panel]]:
    """The topics of which the run has metrics, each with the panels that are not empty."""
    keys = [key for key in columns if key.startswith(EVALUATION_PREFIX)]
    evaluation = {key: key.removeprefix(EVALUATION_PREFIX) for key in keys}
    topics = _TOPICS | {"evaluation": (Panel("Evaluation", "avg@k", evaluation, _draw_points),)}
    drawn = {name: [p for p in panels if p.series.keys() & columns.keys()] for name, panels in topics.items()}
    return {name: panels for name, panels in drawn.items() if panels}


def _draw(title: str, panels: Sequence[Panel], columns: Columns) -> Figure:
    width = min(len(panels), 4)
    height = -(-len(panels) // width)
    figure = Figure(figsize=(4.6 * width, 3.3 * height + 0.3), layout="constrained")
    figure.suptitle(title, fontsize=11, color="#555555")
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(height, width, index + 1)
        panel.draw(axes, panel.series, columns)
        style_axes(axes, panel.title, panel.unit)
    return figure


def style_axes(axes: Axes, title: str, unit: str) -> None:
    """The looks of a picture whose horizontal axis is the steps of a run."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def title_and_unit(metric: str) -> tuple[str, str]:
    """What a picture of one metric is called, and its unit."""
    if metric == "time/step_s":
        return "Time of a step", "seconds"
    panels = (panel for panels in _TOPICS.values() for panel in panels if metric in panel.series)
    panel = next(panels, None)
    return (panel.title, panel.unit) if panel else (metric, METRICS.get(metric, "avg@k"))
