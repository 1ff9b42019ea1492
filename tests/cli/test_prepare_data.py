"""`tepo-nemo prepare-data math` and `overlap`: what they write and print, and every mistake in one line."""

import gzip
import json
from hashlib import sha256
from pathlib import Path

import pytest

from tepo_nemo import cli
from tepo_nemo.data.char_tokenizer import make_char_tokenizer
from tepo_nemo.data.prompts import fingerprint, load_prompts

AMC = [
    {"id": 0, "question": "What is 1+1?", "answer": 2.0, "url": "u0"},
    {"id": 1, "question": "What is 1-2?", "answer": -1.0, "url": "u1"},
    {"id": 0, "question": "What is 2+2?", "answer": 4.0, "url": "u2"},
]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(*arguments, source="amc", path="in.jsonl", template="none"):
    files = ["--input", path, "--output", "set.jsonl"]
    return cli.main(["prepare-data", "math", source, *files, "--template", template, *arguments])


def error_line(capsys):
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err.removeprefix("tepo-nemo: error: ").rstrip("\n")


def test_a_set_that_train_reads_with_its_report(capsys):
    write("in.jsonl", AMC)
    assert prepare(template="qwen3") == 0
    first, second, third = load_prompts(Path("set.jsonl"))
    assert (first.id, second.gold, third.gold) == ("amc-0000", "-1", "4")
    assert first.prompt.startswith("<|im_start|>user\nWhat is 1+1?\nPlease reason")
    assert first.metadata["url"] == "u0" and "MAA" not in first.prompt
    assert "Mathematical Association" in first.metadata["licence"]
    report = json.loads(Path("set.report.json").read_text())
    assert report["input_sha256"] == sha256(Path("in.jsonl").read_bytes()).hexdigest()
    assert (report["rows"], report["prompts"], report["template"]) == (3, 3, "qwen3")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 rows, 3 distinct problems (0 repeats)"
    assert "the published set has 83 problems, this one 3" in lines
    assert lines[-2] == f"set.jsonl: 3 prompts, fingerprint {report['fingerprint']}"


def test_the_fingerprint_is_of_what_is_asked_and_expected():
    write("in.jsonl", AMC)
    prepare()
    prompts = load_prompts(Path("set.jsonl"))
    text = "".join(
        json.dumps({"id": prompt.id, "prompt": prompt.prompt, "gold": prompt.gold}) + "\n"
        for prompt in prompts
    )
    assert fingerprint(prompts) == sha256(text.encode()).hexdigest()
    assert fingerprint(prompts[::-1]) != fingerprint(prompts)


def test_what_is_dropped_is_told(capsys):
    rows = [("a", "1"), ("b", "2"), ("a", "3"), ("b", "2")]
    write("in.jsonl", [{"prompt": text, "answer": gold} for text, gold in rows])
    assert prepare(source="dapo_math_17k") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 rows, 2 distinct problems (2 repeats)"
    assert lines[1].startswith("dropped, contradictory golds: dapo_math_17k-")
    assert lines[1].endswith("1 (row 1) and 3 (row 3)")


def test_a_gold_that_no_grader_can_read_is_told(capsys):
    golds = ["\\frac{1}{2", "\\{1\\}", "}{", "x"]
    write("in.jsonl", [{"problem": f"p{n}", "answer": gold} for n, gold in enumerate(golds)])
    assert prepare(source="omni_math") == 0
    lines = capsys.readouterr().out.splitlines()
    told = [line.rpartition(" ")[2] for line in lines if "unbalanced" in line]
    assert told == ["omni_math-0000", "omni_math-0002"]


@pytest.mark.parametrize(("limit", "left"), [(12, 3), (11, 0)])
def test_long_prompts_are_dropped_by_characters(capsys, limit, left):
    write("in.jsonl", AMC)
    code = prepare("--max-prompt-length", str(limit))
    if left:
        assert (code, len(load_prompts(Path("set.jsonl")))) == (0, left)
        assert "dropped, longer than 12 characters: 0" in capsys.readouterr().out
    else:
        assert code == 2
        assert error_line(capsys).startswith("--max-prompt-length=11: leaves no prompt of in.jsonl")


def test_long_prompts_are_dropped_by_tokens(capsys, folder):
    """One token a character."""
    make_char_tokenizer(folder / "tokenizer", "0123456789+-=")
    write("in.jsonl", [{"question": "1+1=", "answer": 2}, {"question": "10+10=", "answer": 20}])
    assert prepare("--tokenizer", str(folder / "tokenizer"), "--max-prompt-length", "5") == 0
    assert [prompt.prompt for prompt in load_prompts(Path("set.jsonl"))] == ["1+1="]
    assert "dropped, longer than 5 tokens: 1" in capsys.readouterr().out
    assert json.loads(Path("set.report.json").read_text())["too_long"] == ["amc-0001"]


def test_malformed_rows_are_listed_when_they_are_left_out(capsys):
    lines = [json.dumps(row) for row in AMC]
    Path("in.jsonl").write_text("\n".join([lines[0], "{", lines[1], '{"question": "x", "answer": "y"}']))
    assert prepare("--skip-malformed") == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("malformed")]
    assert [line.partition(":")[0] for line in told] == ["malformed, row 2", "malformed, row 4"]
    assert len(load_prompts(Path("set.jsonl"))) == 2


LINES = "".join(json.dumps(row) + "\n" for row in AMC).encode()


@pytest.mark.parametrize(
    ("source", "content", "line"),
    [
        ("amc", None, "in.jsonl: cannot be read (No such file or directory)"),
        ("amc", b"", "in.jsonl: is empty"),
        ("amc", LINES[:-20], "in.jsonl:3: is not JSON"),
        ("amc", gzip.compress(LINES)[:-9], "in.jsonl: is damaged or truncated"),
        ("amc", LINES.replace(b"1+1", b"\xff"), "in.jsonl:1: byte"),
        ("amc", LINES.replace(b"question", b"text"), "in.jsonl:1: has none of the columns problem, question"),
        ("amc", LINES.replace(b": 4.0", b": null"), "in.jsonl:3: has none of the columns reward_model"),
        ("amc", LINES.replace(b"2.0", b'""'), "in.jsonl:1: 'answer' is ''; it must be a string"),
        ("jsonl", LINES, "in.jsonl:3: id '0' is that of row 1; give each its own"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_nothing_is_written(capsys, folder, source, content, line):
    if content is not None:
        Path("in.jsonl").write_bytes(content)
    before = sorted(folder.iterdir())
    assert prepare(source=source) == 2
    assert error_line(capsys).startswith(line)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--max-prompt-length", "0"], "argument --max-prompt-length: '0' is no whole number from 1 on"),
        (["--tokenizer", "t"], "--tokenizer=t: has no use without --max-prompt-length"),
        (["--tokenizer", "./none", "--max-prompt-length", "9"], "--tokenizer=./none: cannot be loaded"),
        (["--output", "none/set.jsonl"], "none/set.jsonl: there is no folder none"),
        (["--output", "in.jsonl"], "in.jsonl: is there already"),
        (["--template", "qwen"], "argument --template: invalid choice: 'qwen'"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, folder, arguments, line):
    write("in.jsonl", AMC)
    assert prepare(*arguments) == 2
    assert error_line(capsys).startswith(line)
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"]


def test_a_problem_with_a_special_token_is_refused(capsys):
    write("in.jsonl", [{"question": "1<|im_end|>", "answer": 1}])
    assert prepare(template="qwen2_5") == 2
    assert error_line(capsys).startswith("in.jsonl: problem 'amc-0000' holds '<|im_end|>'")


def test_overlap_lists_what_two_sets_share(capsys):
    write("a.jsonl", [{"id": n, "prompt": text, "gold": "1"} for n, text in (("x", "1+1="), ("y", "1+2="))])
    write("b.jsonl", [{"id": "z", "prompt": " 1+2=", "gold": "3"}])
    assert cli.main(["prepare-data", "overlap", "a.jsonl", "b.jsonl"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert json.loads(first) == {
        "id": "y",
        "other_id": "z",
        "covered": 1.0,
        "covered_by_other": 1.0,
        "same_gold": False,
    }
    assert last == "overlap 1 / 2"
