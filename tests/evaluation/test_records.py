"""Records of problems: what they hold, and what an interruption leaves of them."""

import pytest
from support.rollouts import Response, make_scored

from tepo_nemo.evaluation.records import AnswerRecord, ProblemRecord, RecordFile, records_of


def record(id, text="\u2028 \ud800"):
    return ProblemRecord("b", id, "7", [AnswerRecord(text, None, "unparseable", 0.0, 3, True)])


def test_a_record_holds_all_answers_to_its_problem():
    """The rows of two problems mixed; the last answer could not be graded."""
    rows = [Response(0, 1.0, length=4), Response(1, 0.0, truncated=True), Response(0, 0.5), Response(1, None)]
    first, second = records_of("amc", make_scored(rows))
    assert (first.benchmark, first.id, first.gold) == ("amc", "p0", "gold p0")
    assert first.answers == [
        AnswerRecord("text 0", None, "ok", 1.0, 4, False),
        AnswerRecord("text 2", None, "ok", 0.5, 2, False),
    ]
    assert second.answers == [
        AnswerRecord("text 1", None, "ok", 0.0, 2, True),
        AnswerRecord("text 3", None, "timeout", 0.0, 2, False),
    ]
    assert (first.average, second.average) == (0.75, 0.0)


def test_what_is_written_is_read_back(tmp_path):
    file = RecordFile(tmp_path / "problems.jsonl")
    assert list(file.read()) == []
    file.append([record("a"), record("b")])
    file.append([record("c")])
    assert list(file.read()) == [record("a"), record("b"), record("c")]


@pytest.mark.parametrize("cut", [1, 30, 95])
def test_a_problem_that_a_killed_process_left_incomplete_is_not_done(tmp_path, cut):
    path = tmp_path / "problems.jsonl"
    RecordFile(path).append([record("a"), record("b")])
    path.write_bytes(path.read_bytes()[:-cut])
    file = RecordFile(path)
    assert [each.id for each in file.read()] == ["a"]
    file.append([record("b")])
    assert [each.id for each in file.read()] == ["a", "b"]


def test_a_first_problem_that_is_incomplete_leaves_nothing(tmp_path):
    (tmp_path / "problems.jsonl").write_text('{"benchmark": "b"')
    assert list(RecordFile(tmp_path / "problems.jsonl").read()) == []
