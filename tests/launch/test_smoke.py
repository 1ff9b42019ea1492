"""The verdicts on the first steps on new hardware."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tepo_nemo.launch.smoke import judge_checkpoint, judge_engine, judge_steps
from tepo_nemo.runs.checkpoints import Position

GOOD = {"loss": 0.1, "grad_norm": 0.5, "update/skipped": 0, "rollout/logprob_gap_mean": 0.004}
ROWS = [GOOD | {"step": 1}, GOOD | {"step": 2}]


def bad(rows) -> list[str]:
    return [verdict.name for verdict in judge_steps(rows, 2) if not verdict.good]


def test_two_good_steps():
    assert bad(ROWS) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rollout/logprob_gap_mean": 0.5}, ["log-probs"]),  # a lost bias, another rotary base
        ({"rollout/logprob_gap_mean": math.nan}, ["log-probs"]),
        ({"loss": math.nan}, ["updates"]),
        ({"grad_norm": math.inf}, ["updates"]),
        ({"update/skipped": 1}, ["updates"]),
        ({"step": 0}, ["steps"]),
    ],
)
def test_what_is_wrong_in_the_first_step(changes, expected):
    assert bad([ROWS[0] | changes, ROWS[1]]) == expected


def test_no_step_at_all():
    assert bad([]) == ["steps", "log-probs", "updates"]


def test_a_step_that_is_missing_and_one_too_many():
    assert bad(ROWS[:1]) == bad([*ROWS, GOOD | {"step": 3}]) == ["steps"]


def test_gradients_that_are_all_zero():
    assert bad([row | {"grad_norm": 0.0} for row in ROWS]) == ["updates"]


@pytest.mark.parametrize(("steps", "bad"), [(0, ["engine", "refit"]), (1, ["refit"]), (2, [])])
def test_an_engine_is_known_by_the_steps_that_training_has_let_it_make(steps, bad):
    assert [verdict.name for verdict in judge_engine("trtllm", steps) if not verdict.good] == bad
    assert judge_engine("megatron", steps) == []  # it generates with the weights of training


def test_a_run_without_a_step_is_one_line(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "tepo_nemo.launch.smoke", str(tmp_path), "2"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("tepo-nemo: error: ") and ended.stderr.count("\n") == 1


def test_the_checkpoint():
    assert judge_checkpoint({Position(2): None, Position(1): None}, 2).good
    found = judge_checkpoint({Position(1): None}, 2)
    assert not found.good
    assert str(found) == "PROBLEM checkpoint      complete: step_000001"
