import json
import os

import pytest

from tepo_nemo.runs.summary import write_summary

FIELDS = {
    "steps": 72,
    "reward_first": 0.25,
    "reward_last": 0.5,
    "eval_before": {"toy": 0.25, "toy_greedy": 0.5},
    "eval_after": {"toy": 0.5, "toy_greedy": 0.75},
    "wall_s": 80.5,
    "status": "done",
}


def test_the_fields_that_scripts_rely_on(tmp_path):
    write_summary(tmp_path / "summary.json", **FIELDS)
    assert json.loads((tmp_path / "summary.json").read_text()) == FIELDS
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_run_that_failed_before_its_first_step(tmp_path):
    nothing = dict.fromkeys(["reward_first", "reward_last", "eval_before", "eval_after"])
    write_summary(tmp_path / "s", **{**FIELDS, **nothing, "steps": 0, "status": "failed"})
    assert json.loads((tmp_path / "s").read_text()) == {
        **nothing,
        "steps": 0,
        "wall_s": 80.5,
        "status": "failed",
    }


def test_a_reward_that_is_not_finite_is_null(tmp_path):
    write_summary(
        tmp_path / "s", **{**FIELDS, "reward_last": float("nan"), "eval_after": {"toy": float("nan")}}
    )
    written = json.loads((tmp_path / "s").read_text())
    assert written["reward_last"] is None and written["eval_after"] == {"toy": None}


def test_an_unknown_status_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="finished"):
        write_summary(tmp_path / "s", **{**FIELDS, "status": "finished"})
    assert os.listdir(tmp_path) == []
