import time

import pytest

from tepo_nemo.errors import UserError
from tepo_nemo.reward.exact_answer import exact_answer
from tepo_nemo.reward.result import RewardResult


def grade(response, gold="122"):
    return exact_answer("37+85=", response, gold, {})


@pytest.mark.parametrize(
    "response, gold",
    [
        ("122", "122"), (" 122\n", "122"), ("0122", "122"), ("+122", "122"), ("122", "0122"),
        ("122", " +122 "), ("\u3000122\xa0", "122"), ("-7", "-7"), ("-007", "-7"), ("0", "0"), ("000", "0"),
        ("-0", "0"), ("+0", "-0"),
    ],
)  # fmt: skip
def test_equal_integers(response, gold):  # faults 31
    assert grade(response, gold).value == 1.0
    assert grade(response, gold).status == "ok"


@pytest.mark.parametrize(
    "response, gold, extracted",
    [
        ("123", "122", "123"), ("-122", "122", "-122"), ("122", "-122", "122"), ("1220", "122", "1220"),
        ("0", "122", "0"), ("120", "12", "120"), ("-12", "-122", "-12"),
    ],
)  # fmt: skip
def test_other_integers_are_wrong_answers(response, gold, extracted):  # faults 31
    assert grade(response, gold) == RewardResult(0.0, "ok", extracted)


def test_a_truncated_response_is_graded_by_its_text():  # faults 34
    assert grade("12") == RewardResult(0.0, "ok", "12")
    assert grade("") == RewardResult(0.0, "unparseable", None)
    assert grade("-", gold="-7") == RewardResult(0.0, "unparseable", None)


@pytest.mark.parametrize(
    "response",
    [
        "", "   ", "+", "-", "--122", "+-122", "- 122", "1 22", "122.", "122.0", "1,22", "1_22", "1e2",
        "0x7a",
        "122 122", "37+85=122", "\\boxed{122}", "<eos>", "122\x00", "12\n2",
        "１２２", "١٢٢", "¹²²", "Ⅻ", "−122", "😀", "122😀", "None", "True", "nan", "inf", "\ud800",
    ],
)  # fmt: skip
def test_anything_else_is_unparseable(response):
    assert grade(response) == RewardResult(0.0, "unparseable", None)


@pytest.mark.parametrize(
    "response",
    [
        "5^(5^(5^(5^5)))", "\\boxed{5^{(5^{(5^{(5^5)})} - 4)}}", "9**9**9**9", "(" * 10**6, "[" * 10**6,
        "0" * 10**6 + "x", "1" * 10**6 + "x", " " * 10**6, " " * 10**6 + "x", "-" * 10**6, "😀" * 10**6,
        "__import__('os').system('true')",
    ],
    ids=range(12),
)  # fmt: skip
def test_hostile_responses_take_no_time(response):  # faults 30
    start = time.perf_counter()
    assert grade(response) == RewardResult(0.0, "unparseable", None)
    assert time.perf_counter() - start < 1.0


def test_a_million_digits_take_no_time():  # faults 30
    start = time.perf_counter()
    assert grade("7" * 10**6) == RewardResult(0.0, "ok", "7" * 10**6)
    assert grade("0" * 10**6 + "122").value == 1.0
    assert grade("7" * 10**6, gold="7" * 10**6).value == 1.0
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize("gold", ["", "12.0", "x", "１２", "1/2"])
def test_a_gold_that_is_no_integer_is_a_mistake_in_the_data(gold):
    with pytest.raises(UserError, match="not an integer") as error:
        grade("12", gold)
    assert repr(gold) in str(error.value) and "37+85=" in str(error.value)
