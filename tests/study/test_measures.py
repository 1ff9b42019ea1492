"""What one run is measured by, counted by hand."""

import math

import numpy as np
import pytest

from tepo_nemo.study.measures import MEASURES, Criteria, Result, Value, measure, steps_to_threshold, title_of

CRITERIA = Criteria(threshold=0.5, window=2)


def result(**columns: list[float]) -> Result:
    named = {name.replace("__", "/"): np.array(values) for name, values in columns.items()}
    steps = np.arange(1, len(next(iter(named.values()))) + 1)
    return Result({"step": steps} | named, {}, {"toy": 0.75}, 60.0)


@pytest.mark.parametrize(
    ("rewards", "window", "expected"),
    [
        ([0.1, 0.6, 0.4, 0.9], 1, Value(2)),
        ([0.1, 0.6, 0.4, 0.9], 2, Value(3)),  # (0.6 + 0.4) / 2 is the threshold itself
        ([0.1, 0.6, 0.3, 0.8], 3, Value(4)),  # 1 / 3, then 1.7 / 3
        ([0.9, 0.9], 2, Value(2)),  # the first mean is that of the first two
        ([0.1, 0.2, 0.3], 2, Value(4, censored=True)),
        ([0.9], 2, Value(2, censored=True)),  # shorter than the window: no mean at all
        ([0.9, math.nan, 0.9, 0.9], 2, Value(4)),
    ],
)
def test_steps_to_threshold(rewards, window, expected):
    assert steps_to_threshold(np.array(rewards), 0.5, window) == expected


def test_every_measure_by_hand():
    run = result(
        reward__mean=[0.0, 0.2, 0.4, 0.8],
        entropy__mean=[2.0, 1.0, 0.5, 0.25],
        ratio__clip_fraction=[0.0, 0.1, math.nan, 0.2],
        grad_norm=[1.0, 2.0, 3.0, 4.0],
        response_length__mean=[10.0, 10.0, 20.0, 30.0],
        time__step_s=[60.0, 1.0, 2.0, 3.0],
    )
    assert {name: measure(run, name, CRITERIA).number for name in MEASURES} == pytest.approx(
        {
            "reward_last": 0.6,  # (0.4 + 0.8) / 2
            "reward_gain": 0.5,  # 0.6 - 0.1
            "steps_to_threshold": 4.0,
            "entropy": 0.375,
            "clip_fraction": 0.1,  # 0.3 over the three steps that have one
            "grad_norm": 2.5,
            "response_length": 25.0,
            "step_seconds": 2.5,  # the first step does not spoil it
        }
    )
    assert measure(run, "eval/toy", CRITERIA) == Value(0.75)


def test_what_a_run_lacks_is_no_number():
    run = result(reward__mean=[0.0, 0.2])
    lacking = [name for name in MEASURES if math.isnan(measure(run, name, CRITERIA).number)]
    assert lacking == ["entropy", "clip_fraction", "grad_norm", "response_length", "step_seconds"]
    assert math.isnan(measure(run, "eval/other", CRITERIA).number)


def test_titles_name_the_criteria():
    assert title_of("steps_to_threshold", CRITERIA) == "steps to a reward of 0.5"
    assert title_of("reward_gain", CRITERIA) == "reward, last 2 steps - first 2"
    assert title_of("eval/toy", CRITERIA) == "toy, after training"
