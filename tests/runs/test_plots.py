import json
import math
import os

import numpy as np
import pytest
from matplotlib.figure import Figure

from tepo_nemo.errors import UserError
from tepo_nemo.runs.metrics import METRICS
from tepo_nemo.runs.plots import plot_run, running_mean

TOPICS = ["overview", "reward", "entropy", "clip_fraction", "kl_mask", "grad_norm", "response_length", "time"]


def make_run(folder, rows):
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i + 1, **row}) + "\n" for i, row in enumerate(rows))
    )
    return folder


@pytest.fixture
def figures(monkeypatch):
    """File name -> the figure saved to it."""
    saved = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.update({path.stem: figure}))
    return saved


def test_running_mean_by_hand():
    np.testing.assert_allclose(running_mean(np.array([1.0, 2.0, 6.0, 4.0])), [1.5, 3.0, 4.0, 5.0])
    np.testing.assert_allclose(running_mean(np.array([7.0])), [7.0])


def test_running_mean_leaves_out_what_is_not_finite():
    values = np.array([math.nan, math.nan, 2.0, math.nan, 4.0])
    np.testing.assert_array_equal(running_mean(values), [math.nan, 2.0, 2.0, 3.0, 4.0])


def test_running_mean_window_is_a_tenth_of_the_run_up_to_51():
    for length, window in ((60, 7), (200, 21), (5000, 51)):
        impulse = np.zeros(length)
        impulse[length // 2] = 1.0
        smooth = running_mean(impulse)
        assert (smooth > 0).sum() == window
        assert smooth.max() == pytest.approx(1 / window)


def test_a_png_for_every_topic_and_an_overview(tmp_path):
    run = make_run(
        tmp_path, [{key: 0.5 + 0.1 * step for key in METRICS if key != "step"} for step in range(4)]
    )
    paths = plot_run(run)
    assert [path.name for path in paths] == [f"{topic}.png" for topic in TOPICS]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in paths)
    assert sorted(path.name for path in paths) == sorted(os.listdir(tmp_path / "plots"))


def test_curves_are_the_metrics_with_their_running_mean(tmp_path, figures):
    make_run(tmp_path, [{"reward/mean": r} for r in (0.1, 0.2, 0.6, 0.4)])
    plot_run(tmp_path)
    assert figures.keys() == {"overview", "reward"}
    for figure in figures.values():
        (axes,) = figure.axes
        raw, mean = axes.lines
        np.testing.assert_array_equal(raw.get_xydata(), [(1, 0.1), (2, 0.2), (3, 0.6), (4, 0.4)])
        np.testing.assert_allclose(mean.get_ydata(), [0.15, 0.3, 0.4, 0.5])
        assert mean.get_linewidth() > raw.get_linewidth()
        assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
            "Mean reward",
            "step",
            "reward per response",
        )


def test_null_is_a_gap_and_not_a_zero(tmp_path, figures):
    make_run(tmp_path, [{"grad_norm": 1.0}, {"grad_norm": None}, {"grad_norm": 3.0}])
    plot_run(tmp_path)
    raw, mean = figures["grad_norm"].axes[0].lines
    np.testing.assert_array_equal(raw.get_ydata(), [1.0, math.nan, 3.0])
    np.testing.assert_array_equal(mean.get_ydata(), [1.0, 2.0, 3.0])


def test_seconds_of_the_phases_stack_up_to_the_step(tmp_path, figures):
    phases = {"time/rollout_s": 2.0, "time/old_stats_s": 1.0, "time/train_s": 4.0}
    make_run(tmp_path, [{**phases, "time/step_s": 10.0}, {"time/rollout_s": 5.0, "time/step_s": 6.0}])
    plot_run(tmp_path)
    (axes,) = figures["time"].axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    heights = [[(bar.get_y(), bar.get_height()) for bar in container] for container in axes.containers]
    bars = dict(zip(labels, heights, strict=True))
    assert bars == {
        "rollout": [(0, 2), (0, 5)],
        "old statistics": [(2, 1), (5, 0)],
        "updates": [(3, 4), (5, 0)],
        "rest": [(7, 3), (5, 1)],
    }
    assert axes.get_ylabel() == "seconds"


def test_evaluations_are_points_at_their_steps(tmp_path, figures):
    make_run(tmp_path, [{"eval/toy": 0.2}, {"loss": 0.0}, {"eval/toy": 0.6, "eval/toy_greedy": 0.7}])
    plot_run(tmp_path)
    (axes,) = figures["evaluation"].axes
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert points == {"toy": [[1, 0.2], [3, 0.6]], "toy_greedy": [[3, 0.7]]}


def test_kl_of_all_and_of_masked_tokens_are_told_apart(tmp_path, figures):
    make_run(tmp_path, [{"kl/mean": 1e-4, "kl/masked_mean": 3e-4}, {"kl/mean": 2e-4, "kl/masked_mean": None}])
    plot_run(tmp_path)
    axes = figures["kl_mask"].axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["all", "masked"]
    all_tokens, masked = axes.lines[0], axes.lines[2]
    np.testing.assert_array_equal(all_tokens.get_ydata(), [1e-4, 2e-4])
    np.testing.assert_array_equal(masked.get_ydata(), [3e-4, math.nan])
    assert all_tokens.get_color() != masked.get_color()


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "has no metrics.jsonl; give the output folder of a run"),
        ("", "has no steps"),
        ('{"step": 1}\n{"step": 2, "lo', "metrics.jsonl:2: is not JSON"),
    ],
)
def test_a_folder_without_readable_metrics_is_refused(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=reason) as error:
        plot_run(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert not (tmp_path / "plots").exists()
