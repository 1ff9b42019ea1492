import json
import math

import numpy as np
import pytest

from tepo_nemo.errors import UserError
from tepo_nemo.runs.metrics import METRICS, MetricsWriter, read_metrics

CONTRACT = """
step consumed_prompts reward/mean reward/group_std_zero_fraction response_length/mean
response_length/truncated_fraction entropy/mean entropy/delta_mean ratio/mean ratio/clip_fraction kl/mean
kl/masked_mean mask/fraction loss grad_norm lr verifier/failed_fraction rollout/logprob_gap_mean
tokens/trained tokens/padding_fraction time/rollout_s time/old_stats_s time/train_s time/step_s update/skipped
""".split()


def write_steps(path, steps, reward):
    writer = MetricsWriter(path)
    for step in steps:
        writer.write(step, {"reward/mean": reward})


def steps_and_rewards(path):
    return [(row["step"], row["reward/mean"]) for row in read_metrics(path)]


def test_every_metric_of_the_contract_is_documented():
    assert set(CONTRACT) <= METRICS.keys()
    means = [key for key in METRICS if key.endswith(("mean", "_fraction", "/fraction"))]
    assert all(" / " in METRICS[key] for key in means), "a mean or a share tells its denominator"


def test_one_object_a_line_with_the_step_first(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"reward/mean": 0.25, "tokens/trained": 7})
    writer.write(2, {"reward/mean": 0.5, "eval/toy": 0.75})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "reward/mean": 0.25, "tokens/trained": 7}\n'
        '{"step": 2, "reward/mean": 0.5, "eval/toy": 0.75}\n'
    )


def test_a_step_in_the_metrics_is_that_of_the_line(tmp_path):
    MetricsWriter(tmp_path / "m").write(3, {"step": 3, "loss": 1.0})
    assert json.loads((tmp_path / "m").read_text()) == {"step": 3, "loss": 1.0}


def test_a_value_that_is_not_finite_is_null_and_is_read_as_nan(tmp_path):
    MetricsWriter(tmp_path / "m").write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    assert (tmp_path / "m").read_text() == '{"step": 1, "loss": null, "grad_norm": null, "lr": null}\n'
    (row,) = read_metrics(tmp_path / "m")
    assert row.keys() == {"step", "loss", "grad_norm", "lr"} and math.isnan(row["grad_norm"])


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    MetricsWriter(tmp_path / "m").write(1, {"loss": np.float32(0.5), "tokens/trained": np.int64(3)})
    assert (tmp_path / "m").read_text() == '{"step": 1, "loss": 0.5, "tokens/trained": 3}\n'


@pytest.mark.parametrize(
    "metrics, error",
    [
        ({"reward/maen": 1.0}, KeyError),
        ({"evaluation/toy": 1.0}, KeyError),
        ({"loss": "0.5"}, TypeError),
        ({"loss": None}, TypeError),
        ({"loss": np.zeros(())}, TypeError),  # as a tensor: no number before .item()
    ],
)
def test_what_is_no_metric_is_refused_and_not_written(tmp_path, metrics, error):
    writer = MetricsWriter(tmp_path / "m")
    writer.write(1, {"loss": 1.0})
    with pytest.raises(error, match=next(iter(metrics))):
        writer.write(2, {"grad_norm": 1.0, **metrics})
    assert [row["step"] for row in read_metrics(tmp_path / "m")] == [1]


@pytest.mark.parametrize("resumed_at", [1, 3, 5, 6])
def test_each_step_once_after_a_resume(tmp_path, resumed_at):
    """The checkpoint is older than the metrics, by none, some or all of the steps."""
    path = tmp_path / "m"
    write_steps(path, range(1, 6), reward=0.1 + 0.2)
    write_steps(path, range(resumed_at, 8), reward=0.9)
    assert steps_and_rewards(path) == [
        (step, 0.1 + 0.2 if step < resumed_at else 0.9) for step in range(1, 8)
    ]


def test_a_resume_that_writes_nothing_drops_nothing(tmp_path):
    write_steps(tmp_path / "m", range(1, 6), reward=0.5)
    MetricsWriter(tmp_path / "m")
    assert len(read_metrics(tmp_path / "m")) == 5


@pytest.mark.parametrize("whole_lines", [0, 2])
def test_a_line_that_a_killed_run_left_incomplete_is_dropped(tmp_path, whole_lines):
    path = tmp_path / "m"
    path.touch()
    write_steps(path, range(1, whole_lines + 1), reward=0.5)
    with open(path, "a") as file:
        file.write('{"step": 3, "reward/me')
    write_steps(path, [whole_lines + 1], reward=0.75)
    expected = [(step, 0.5) for step in range(1, whole_lines + 1)] + [(whole_lines + 1, 0.75)]
    assert steps_and_rewards(path) == expected


@pytest.mark.parametrize(
    "line, reason",
    [
        ('{"step": 2, "loss', "not JSON"),
        ('{"loss": 1.0}', "step is None"),
        ('{"step": 1}', "step is 1 and must rise"),
        ('{"step": null}', "step is nan"),
        ('{"step": 2, "loss": "high"}', "loss is 'high'"),
        ('{"step": 2, "loss": [1]}', "loss is"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, reason):
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    for read in (read_metrics, MetricsWriter):
        with pytest.raises(UserError, match=reason) as error:
            read(path)
        assert str(error.value).startswith(f"{path}:2: ")


@pytest.mark.parametrize("step", [0, 3, 5, 9])
def test_a_run_that_goes_on_drops_what_came_after(tmp_path, step):
    path = tmp_path / "m"
    write_steps(path, range(1, 6), reward=0.1 + 0.2)
    rows = MetricsWriter(path).keep_until(step)
    assert [row["step"] for row in rows] == list(range(1, min(step, 5) + 1))
    assert read_metrics(path) == rows
    write_steps(path, [step + 1], reward=0.9)
    assert steps_and_rewards(path)[-1] == (step + 1, 0.9)


def test_a_run_without_metrics_has_none_to_keep(tmp_path):
    assert MetricsWriter(tmp_path / "m").keep_until(7) == []
    assert not (tmp_path / "m").exists()
