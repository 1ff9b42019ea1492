import pytest

from tepo_nemo.errors import UserError
from tepo_nemo.reward.grading import load_reward
from tepo_nemo.reward.last_answer import last_answer
from tepo_nemo.reward.result import RewardResult


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("7+8=15;15+5=20", RewardResult(1.0, "ok", "20")),
        ("7+8=5;5+5=20", RewardResult(1.0, "ok", "20")),  # what comes before does not count
        ("20", RewardResult(1.0, "ok", "20")),
        ("7+8=15;15+5= 020 ", RewardResult(1.0, "ok", "20")),
        ("7+8=20;20+5=25", RewardResult(0.0, "ok", "25")),
        ("7+8=15;15+5=20;", RewardResult(0.0, "unparseable")),
        ("7+8=15;15+5=", RewardResult(0.0, "unparseable")),
        ("7+8=15;20", RewardResult(0.0, "unparseable")),
        ("", RewardResult(0.0, "unparseable")),
    ],
)
def test_responses_by_hand(response, expected):
    assert last_answer("7+8+5=", response, "20", {}) == expected


def test_a_gold_that_is_no_integer_is_refused():
    with pytest.raises(UserError, match="'twenty' of prompt '7\\+8\\+5=' is not an integer"):
        last_answer("7+8+5=", "7+8=15", "twenty", {})


def test_it_is_known_by_its_name():
    assert load_reward("last_answer") is last_answer
