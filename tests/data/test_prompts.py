import json

import pytest

from tepo_nemo.data.prompts import Prompt, load_prompts
from tepo_nemo.errors import UserError

GOOD = {"id": "a", "prompt": "1+1=", "gold": "2"}


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_come_in_the_order_of_the_file(tmp_path):
    path = write_lines(
        tmp_path / "p.jsonl",
        {"id": "b", "prompt": " 2²+1=\n", "gold": "5", "metadata": {"level": 2}},
        {"gold": "2", "prompt": "1+1=", "id": "a"},
    )
    assert load_prompts(path) == [
        Prompt(id="b", prompt=" 2²+1=\n", gold="5", metadata={"level": 2}),
        Prompt(id="a", prompt="1+1=", gold="2", metadata={}),
    ]


def test_a_last_line_without_newline_counts(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "id": "b"}))
    assert [prompt.id for prompt in load_prompts(path)] == ["a", "b"]


@pytest.mark.parametrize(
    "row, reason",
    [
        *[({k: v for k, v in GOOD.items() if k != name}, f"no field '{name}'") for name in GOOD],
        *[({**GOOD, "id": "b", name: ""}, f"'{name}' is ''") for name in GOOD],
        ({**GOOD, "id": "b", "prompt": " \n"}, "'prompt' is"),
        ({**GOOD, "id": "b", "gold": 2}, "'gold' is 2"),
        ({**GOOD, "id": 7}, "'id' is 7"),
        ({**GOOD, "id": "b", "prompt": ["1+1="]}, "'prompt' is"),
        ({**GOOD, "id": "b", "gold": None}, "'gold' is None"),
        ({**GOOD, "id": "b", "prompt": "\ud800"}, "lone surrogate"),
        ({**GOOD, "id": "b", "metadata": [1]}, "'metadata' is"),
        ({**GOOD, "id": "b", "metadata": None}, "'metadata' is None"),
        ({**GOOD, "id": "b", "answer": "2"}, "unknown field 'answer'"),
        (GOOD, "id 'a' is that of line 1"),
        ([GOOD], "JSON list"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, reason):
    path = write_lines(tmp_path / "p.jsonl", GOOD, row)
    with pytest.raises(UserError, match=reason) as error:
        load_prompts(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert "\n" not in str(error.value)


def test_an_empty_set_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="empty.jsonl: has no prompts"):
        load_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match="absent.jsonl: cannot be read"):
        load_prompts(tmp_path / "absent.jsonl")


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"id": "b", "prompt": "\xe9", "gold": "1"}\n')
    with pytest.raises(UserError, match="p.jsonl:2: byte 23 is not UTF-8"):
        load_prompts(path)
