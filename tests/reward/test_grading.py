import logging
import sys

import pytest

from tepo_nemo.errors import UserError
from tepo_nemo.reward.exact_answer import exact_answer
from tepo_nemo.reward.grading import grade_batch, load_reward
from tepo_nemo.reward.result import RewardResult


def items(*responses):
    return [("1+1=", response, "2", {"number": number}) for number, response in enumerate(responses)]


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    """Writes the module users_reward of a user; gone from the interpreter afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source):
        (tmp_path / "users_reward.py").write_text(source)

    yield write
    sys.modules.pop("users_reward", None)


def test_results_come_in_the_order_of_the_items():
    results = grade_batch(exact_answer, items("2", "3", "two", " 02 "))
    assert results == [
        RewardResult(1.0, "ok", "2"),
        RewardResult(0.0, "ok", "3"),
        RewardResult(0.0, "unparseable", None),
        RewardResult(1.0, "ok", "2"),
    ]
    assert grade_batch(exact_answer, []) == []


def test_a_reward_function_is_told_all_about_the_response():
    def remember(prompt, response_text, gold, metadata):
        return RewardResult(float(metadata["number"]), "ok", f"{prompt}|{response_text}|{gold}")

    assert grade_batch(remember, items("x", "y"))[1] == RewardResult(1.0, "ok", "1+1=|y|2")


@pytest.mark.parametrize("broken", [{0}, {1}, {2}, {0, 1, 2}])
def test_an_exception_is_an_error_of_that_response_alone(broken, caplog):
    def fragile(prompt, response_text, gold, metadata):
        if metadata["number"] in broken:
            raise ZeroDivisionError("nothing to divide by")
        return RewardResult(1.0, "ok")

    with caplog.at_level(logging.ERROR):
        results = grade_batch(fragile, items("a", "b", "c"))
    assert [result.status for result in results] == ["error" if i in broken else "ok" for i in range(3)]
    assert all(result.failed == (i in broken) for i, result in enumerate(results))
    assert caplog.text.count("Traceback") == 1, "one a batch"
    assert f"failed on {len(broken)} of 3" in caplog.text


def test_a_reward_that_is_not_finite_is_an_error():
    def diverging(prompt, response_text, gold, metadata):
        return RewardResult(float("nan"), "ok")

    assert [result.status for result in grade_batch(diverging, items("a"))] == ["error"]


def test_a_verdict_of_the_function_itself_is_kept():
    results = grade_batch(lambda *_: RewardResult(0.0, "timeout"), items("a"))
    assert results == [RewardResult(0.0, "timeout")]


def test_an_interruption_is_not_swallowed():
    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grade_batch(interrupted, items("a"))


def test_wrong_data_ends_the_run_instead_of_masking_every_response():
    with pytest.raises(UserError, match="'two' of prompt '1\\+1=' is not an integer"):
        grade_batch(exact_answer, [("1+1=", "2", "two", {})])


@pytest.mark.parametrize("returned", [1.0, True, None, (1.0, "ok")])
def test_a_function_that_returns_something_else_is_refused(returned):
    with pytest.raises(UserError, match="return a tepo_nemo.reward.result.RewardResult"):
        grade_batch(lambda *_: returned, items("a"))


def test_rewards_are_found_by_name_and_by_path(users_module):
    assert load_reward("exact_answer") is exact_answer
    assert load_reward("tepo_nemo.reward.exact_answer.exact_answer") is exact_answer
    users_module("def mine(prompt, response_text, gold, metadata): return 42")
    assert load_reward("users_reward.mine")(None, None, None, None) == 42


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("exact_anser", "exact_answer"),
        ("last_anwser", "last_answer"),
        ("math", "math_answer"),
        ("box", "boxed"),
    ],
)
def test_an_unknown_name_lists_the_known_and_the_nearest(name, nearest):
    with pytest.raises(
        UserError,
        match=f"data.reward={name} is unknown; did you mean {nearest}\\?.*Known: boxed, exact_answer, ",
    ):
        load_reward(name)


@pytest.mark.parametrize(
    "source, path, reason",
    [
        (None, "users_reward.mine", "No module named 'users_reward'"),
        ("x = 1", "users_reward.mine", "no attribute 'mine'"),
        ("x = 1", "users_reward.x", "is a int; give the path of a function"),
        ("import absent_package", "users_reward.mine", "No module named 'absent_package'"),
        ("def", "users_reward.mine", "SyntaxError"),
        ("raise RuntimeError('no GPU')", "users_reward.mine", "RuntimeError: no GPU"),
        (None, ".mine", "data.reward=.mine"),
        (None, "..", "data.reward=.. cannot be imported"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(users_module, source, path, reason):
    if source is not None:
        users_module(source)
    with pytest.raises(UserError, match=reason) as error:
        load_reward(path)
    assert path in str(error.value)
