"""`tepo-nemo grade`: verdicts, disagreements and what it refuses."""

import json

import pytest

from tepo_nemo import cli

# (gold, response, form, expected), graded below as right, right, wrong, right, unparseable
ROWS = [
    (r"\frac{1}{2}", "0.5", "answer", True),
    ("7", r"so \boxed{007}", "response", True),
    ("7", r"so \boxed{8}", "response", False),
    ("1,2", "2, 1", "answer", False),  # a wrong expectation
    ("7", r"\boxed{7} \boxed{", "response", None),
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows():
    return [
        {"gold": gold, "response": response, "form": form}
        | ({} if expected is None else {"expected": expected, "note": "x"})
        for gold, response, form, expected in ROWS
    ]


def grade(*arguments):
    return cli.main(["grade", "--workers", "2", *map(str, arguments)])


def test_a_line_a_row_every_disagreement_and_the_agreement_last(tmp_path, capsys):
    tower = {
        "gold": "1",
        "response": "1+" * 20 + "x",
        "form": "answer",
        "expected": False,
        "timeout_ok": True,
    }
    assert grade(write(tmp_path / "pairs.jsonl", [*rows(), tower])) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[:6] == [
        r"1  right  ok  \frac{1}{2}  0.5",
        "2  right  ok  7  007",
        "3  wrong  ok  7  8",
        "4  right  ok  1,2  2, 1",
        "5  wrong  unparseable  7  -",
        f"6  wrong  ok  1  {'1+' * 20}x",
    ]
    assert output.out.splitlines()[6:] == [
        "disagreement 4: expected wrong, status ok, gold 1,2, response 2, 1",
        "agreement 4 / 5",
    ]
    assert output.err == ""


def test_metadata_has_the_rules_of_a_set(tmp_path, capsys):
    row = {"gold": "0.53", "response": "0.534", "form": "answer", "expected": True}
    assert grade(write(tmp_path / "p.jsonl", [row, row | {"metadata": {"answer_form": "numeric"}}])) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "agreement 1 / 2"


def test_what_runs_out_of_time_agrees_where_that_is_right(tmp_path, capsys):
    # Equal only by the sum of six hundred terms: more than a hundredth of a second for sure.
    long = "+".join(f"x^{{{power}}}" for power in range(600))
    row = {"gold": "y", "response": long, "form": "answer", "expected": True}
    path = write(tmp_path / "p.jsonl", [row, row | {"timeout_ok": True}])
    assert grade("--time-limit", "0.01", path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1:3] for line in lines[:2]] == [["wrong", "timeout"]] * 2
    assert lines[2].startswith("disagreement 1: expected right, status timeout") and lines[3:] == [
        "agreement 1 / 2"
    ]


GOOD = {"gold": "1", "response": "1", "form": "answer"}


@pytest.mark.parametrize(
    ("content", "mistake"),
    [
        (None, "p.jsonl: cannot be read (No such file or directory)"),
        (b"", "p.jsonl: has no rows"),
        (json.dumps(GOOD).encode() + b'\n{"gold": "1", "resp', "p.jsonl:2: is not JSON"),
        (b'{"gold": "\xff"}', "p.jsonl:1: byte 10 is not UTF-8"),
        (b"[]", "p.jsonl:1: is a JSON list"),
        ({"answer": "1", "response": "1", "form": "answer"}, "p.jsonl:1: has no field 'gold'"),
        (GOOD | {"gold": " "}, "p.jsonl:1: 'gold' is empty"),
        (GOOD | {"gold": 1}, "p.jsonl:1: 'gold' is 1; it must be a string"),
        (GOOD | {"form": "box"}, "p.jsonl:1: 'form' is 'box'; it must be one of answer, response"),
        (GOOD | {"expected": "yes"}, "p.jsonl:1: 'expected' is 'yes'; it must be true or false"),
        (GOOD | {"metadata": 1}, "p.jsonl:1: 'metadata' is 1; it must be a JSON object"),
        (GOOD | {"metadata": {"answer_form": "digits"}}, "answer_form='digits' of gold '1' is not one of"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, capsys, content, mistake):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert grade(path) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert mistake in output.err


@pytest.mark.parametrize("option", ["--workers", "--time-limit"])
@pytest.mark.parametrize("value", ["0", "-1", "many", "inf"])
def test_wrong_options_are_one_line(capsys, option, value):
    assert cli.main(["grade", option, value, "x.jsonl"]) == 2
    assert f"argument {option}: invalid positive" in capsys.readouterr().err
