import json

from tepo_nemo.runs.samples import Sample, write_samples


def sample(response, **changes):
    fields = dict(
        prompt_id="p1", prompt="1+2=", response=response, gold="3", extracted="3", verdict="ok", reward=1.0,
        advantage=0.5, length=2, truncated=False,
    )  # fmt: skip
    return Sample(**{**fields, **changes})


def test_the_fields_that_an_audit_needs(tmp_path):  # faults 31
    write_samples(
        tmp_path / "s.jsonl", [sample("3"), sample("x", extracted=None, verdict="unparseable", reward=0.0)]
    )
    first, second = map(json.loads, (tmp_path / "s.jsonl").read_text().splitlines())
    assert first == {
        "prompt_id": "p1", "prompt": "1+2=", "response": "3", "gold": "3", "extracted": "3", "verdict": "ok",
        "reward": 1.0, "advantage": 0.5, "length": 2, "truncated": False,
    }  # fmt: skip
    assert second["extracted"] is None and second["verdict"] == "unparseable"


def test_hostile_responses_keep_one_line_each(tmp_path):
    responses = [
        "two\nlines",
        "a\u2028b\u0085c\u000bd",
        "\ud83d",
        "😀",
        '"}\n{"reward": 1}',
        "",
        "\x00",
        "9" * 10**6,
    ]
    write_samples(tmp_path / "s.jsonl", map(sample, responses))
    lines = (tmp_path / "s.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b""
    assert [json.loads(line)["response"] for line in lines] == responses


def test_a_repeated_step_replaces_its_file(tmp_path):
    write_samples(tmp_path / "s.jsonl", [sample("1"), sample("2")])
    write_samples(tmp_path / "s.jsonl", [sample("3", advantage=float("nan"))])
    (line,) = (tmp_path / "s.jsonl").read_text().splitlines()
    assert json.loads(line)["response"] == "3" and json.loads(line)["advantage"] is None
