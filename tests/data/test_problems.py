"""Problems of the published forms, each row written here by hand in the columns of its publisher."""

import pytest

from tepo_nemo.data.problems import Malformed, to_problem
from tepo_nemo.data.sources import SOURCES

HUB_FRAME = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def verl(text, gold):
    return {
        "prompt": [{"content": text, "role": "user"}],
        "reward_model": {"ground_truth": gold, "style": "rule"},
    }


@pytest.mark.parametrize(
    ("source", "fields", "text", "gold"),
    [
        ("dapo_math_17k", verl(HUB_FRAME.format("Add 2 and 3."), "5"), "Add 2 and 3.", "5"),
        ("dapo_math_17k", verl("Add 2 and 3.", "-5"), "Add 2 and 3.", "-5"),
        ("dapo_math_17k", {"prompt": "Add.", "solution": "34"}, "Add.", "34"),
        (
            "aime24",
            verl("Add. Let's think step by step and output the final answer within \\boxed{}.", "025"),
            "Add.",
            "25",
        ),
        ("aime24", {"prompt": "Add.", "answer": "000", "source": "aime", "id": "7"}, "Add.", "0"),
        ("aime24", {"ID": "2024-I-4", "Problem": "Add.", "Answer": 116}, "Add.", "116"),
        ("aime25", verl("Find the angle.", "336^\\circ"), "Find the angle.", "336"),
        ("amc", {"id": 3, "question": "Add.", "answer": 142.0, "url": "u"}, "Add.", "142"),
        ("amc", {"prompt": "Add.", "answer": "-4.0"}, "Add.", "-4"),
        ("math500", {"problem": "Add.", "answer": "\\frac12", "id": "t/1"}, "Add.", "\\frac12"),
        ("olympiadbench", {"id": 16, "question": "Add.", "final_answer": ["$\\pi$"]}, "Add.", "$\\pi$"),
        ("minerva", {"problem": "Add.", "solution": "\\boxed{1} or \\boxed{x^{2}}."}, "Add.", "x^{2}"),
        ("omni_math", {"problem": " Add.\n", "solution": "w", "answer": " 7 "}, "Add.", "7"),
        ("jsonl", {"id": "x", "problem": "Add.", "answer": "3.8e5"}, "Add.", "3.8e5"),
    ],
)  # fmt: skip
def test_text_and_gold_of_every_published_form(source, fields, text, gold):
    problem = to_problem(fields, 1, SOURCES[source])
    assert (problem.text, problem.gold) == (text, gold)
    assert problem.metadata["problem"] == text


def test_what_is_known_of_a_problem_goes_along():
    fields = {
        "question": "Add.",
        "final_answer": ["2"],
        "id": 1,
        "error": "1e-1",
        "unit": None,
        "context": None,
    }
    metadata = to_problem(fields, 1, SOURCES["olympiadbench"]).metadata
    assert metadata == {
        "source": "olympiadbench",
        "licence": "MIT (OpenBMB/OlympiadBench)",
        "answer_form": "expression",
        "problem": "Add.",
        "error": "1e-1",
        "unit": None,
    }


def test_further_columns_may_stand_in_a_section_of_their_own():
    fields = {"problem": "Add.", "answer": "2", "id": "a", "meta": {"level": 3, "other": 1}}
    assert to_problem(fields, 1, SOURCES["math500"]).metadata["level"] == 3


def test_metadata_of_ones_own_goes_along_and_may_say_how_golds_are_compared():
    fields = {
        "id": "a",
        "problem": "Add.",
        "answer": "2",
        "metadata": {"answer_form": "choice", "licence": "CC0"},
    }
    assert to_problem(fields, 1, SOURCES["jsonl"]).metadata == {
        "source": "jsonl",
        "licence": "CC0",
        "answer_form": "choice",
        "problem": "Add.",
    }


def test_ids_are_those_of_the_source_or_numbers_or_of_the_text():
    row = {"id": 5, "problem": "a  b", "answer": "1"}
    assert to_problem(row, 12, SOURCES["olympiadbench"]).id == "5"
    assert to_problem(row, 12, SOURCES["amc"]).id == "amc-0011"  # whose `id` is no key
    of_text = to_problem(row, 12, SOURCES["dapo_math_17k"]).id
    # printf 'a b' | sha256sum
    assert of_text == "dapo_math_17k-c8687a08aa5d"
    assert to_problem(row | {"problem": "a\nb "}, 99, SOURCES["dapo_math_17k"]).id == of_text


@pytest.mark.parametrize(
    ("source", "fields", "reason"),
    [
        ("jsonl", {"id": "x", "text": "Add.", "answer": "3"}, "has none of the columns problem, question"),
        ("jsonl", {"id": "x", "problem": "Add."}, "has none of the columns reward_model, answer"),
        ("jsonl", {"id": "x", "problem": "Add.", "answer": None}, "has none of the columns reward_model"),
        ("jsonl", {"id": "x", "problem": "Add.", "answer": " "}, "'answer' is ' '; it must be a string"),
        ("jsonl", {"id": "x", "problem": "Add.", "answer": True}, "'answer' is True"),
        ("jsonl", {"id": "x", "problem": "", "answer": "3"}, "'problem' is ''"),
        ("jsonl", {"id": "x", "problem": "\ud800", "answer": "3"}, "lone surrogate"),
        ("jsonl", {"problem": "Add.", "answer": "3"}, "'id' is None"),
        ("aime24", verl("Add.", None), "'reward_model' is None"),
        ("aime24", {"problem": "Add.", "answer": "7/2"}, "the gold '7/2' is not an integer"),
        ("amc", {"problem": "Add.", "answer": 142.5}, "the gold '142.5' is not an integer"),
        ("dapo_math_17k", {"prompt": [], "answer": "1"}, "'prompt' has 0 messages of a user"),
        ("olympiadbench", {"id": 1, "question": "Add.", "final_answer": ["1", "2"]}, "has 2 answers"),
        ("minerva", {"problem": "Add.", "solution": "so \\boxed{1} and \\boxed{2"}, "never closed"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_problem_says_why(source, fields, reason):
    with pytest.raises(Malformed, match=".*") as error:
        to_problem(fields, 1, SOURCES[source])
    assert reason in str(error.value)
