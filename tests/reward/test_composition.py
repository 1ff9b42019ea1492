"""Rewards made of several, and the rewards for how a response is written."""

import pytest

from tepo_nemo.errors import UserError
from tepo_nemo.reward.composition import WeightedSum
from tepo_nemo.reward.grading import load_reward
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.reward.shape import boxed, short, thinks_first


def constant(value, status="ok", extracted=None):
    return lambda *_: RewardResult(value, status, extracted)


def test_the_sum_of_weight_times_value():
    reward = WeightedSum([(constant(1.0, extracted="7"), 2.0), (constant(0.25), -4.0), (constant(3.0), 0.5)])
    result = reward("", "", "", {})
    assert result == RewardResult(2.5, "ok", "7", correctness=1.0)  # 2 - 1 + 1.5
    assert result.correct == 1.0


def test_an_unreadable_answer_is_a_verdict():
    result = WeightedSum([(constant(0.0, "unparseable"), 1.0), (constant(1.0), 0.1)])("", "", "", {})
    assert result == RewardResult(0.1, "unparseable", None, correctness=0.0)


@pytest.mark.parametrize("status", ["timeout", "error"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_part_that_failed_makes_the_whole_fail(status, place):
    parts = [(constant(1.0), 1.0), (constant(1.0), 1.0)]
    parts[place] = (constant(0.0, status), 1.0)
    result = WeightedSum(parts)("", "", "", {})
    assert result.status == status and result.failed


def test_a_reward_of_one_value_is_its_correctness():
    assert RewardResult(0.5, "ok").correct == 0.5


def test_parts_with_options():
    reward = load_reward([("exact_answer", 1.0, {}), ("short", 0.5, {"characters": 10})])
    assert reward("", "12", "12", {}).value == 1 + 0.5 * (1 - 2 / 10)
    assert reward.in_process
    assert not load_reward([("exact_answer", 1.0, {}), ("math_answer", 1.0, {})]).in_process


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (("short", 1.0, {"letters": 3}), "short has no option letters; it has characters"),
        (("exact_answer", 1.0, {"gold": "3"}), "exact_answer has no option gold; it has none"),
        (("shrt", 1.0, {}), "data.reward=shrt is unknown; did you mean short?"),
    ],
)
def test_a_wrong_part_is_refused(part, message):
    with pytest.raises(UserError) as refusal:
        load_reward([("exact_answer", 1.0, {}), part])
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("response", "value"), [(r"\boxed{7}", 1), (r"\boxed{ }", 0), ("7", 0), (r"\boxed{7} \boxed{", 0)]
)
def test_boxed(response, value):
    assert boxed("", response, "8", {}) == RewardResult(value, "ok")


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a\nb</think>c", 1), (" <think></think>", 1), ("<think>a", 0), ("a</think>b", 0), ("a", 0),
        ("x<think>a</think>b", 0), ("<think>a<think>b</think>c", 0), ("<think>a</think>b</think>", 0),
    ],
)  # fmt: skip
def test_thinks_first(response, value):
    assert thinks_first("", response, "", {}) == RewardResult(value, "ok")


def test_short_falls_linearly_with_the_characters():
    values = [short("", "x" * length, "", {}, characters=4).value for length in range(6)]
    assert values == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
