"""Repeats, contradictions and malformed rows, counted by hand."""

import pytest

from tepo_nemo.data.rows import Row
from tepo_nemo.data.selection import select
from tepo_nemo.data.sources import SOURCES
from tepo_nemo.errors import UserError


def rows_of(*pairs):
    return [Row(n, {"prompt": text, "answer": gold}) for n, (text, gold) in enumerate(pairs, start=1)]


def chosen(rows, source, **options):
    return select(rows, SOURCES[source], "FILE", **({"skip_malformed": False} | options))


def test_a_raw_set_repeats_each_prompt():
    selection = chosen(
        rows_of(("a b", "1"), ("c", "2"), ("a  b", "01"), ("c", "2"), ("a\nb", "1")), "dapo_math_17k"
    )
    assert (selection.rows, selection.distinct, selection.repeats) == (5, 2, 3)
    assert [(problem.text, problem.gold) for problem in selection.problems] == [("a b", "1"), ("c", "2")]


def test_contradictory_golds_drop_the_prompt_with_all_its_rows():
    selection = chosen(rows_of(("a", "1"), ("b", "5"), ("a", "1"), ("a", "2"), ("a ", "1")), "dapo_math_17k")
    assert [problem.text for problem in selection.problems] == ["b"]
    (dropped,) = selection.contradictory
    assert dropped["golds"] == [{"gold": "1", "row": 1}, {"gold": "2", "row": 4}]
    assert (dropped["rows"], selection.distinct, selection.repeats) == (4, 2, 3)


def test_omni_math_loses_both_members_of_a_pair():
    selection = chosen(rows_of(("a", "1"), ("b", "2"), ("c", "3"), ("b", "2")), "omni_math")
    assert [problem.id for problem in selection.problems] == ["omni_math-0000", "omni_math-0002"]
    assert selection.repeated == [{"id": "omni_math-0001", "rows": 2}]


def test_a_set_published_once_a_sample_has_each_problem_once():
    """AIME is also published with each problem 32 times."""
    selection = chosen(rows_of(*[(f"p{n}", str(n)) for n in range(30)] * 32), "aime24")
    assert (selection.rows, len(selection.problems), selection.repeats) == (960, 30, 930)


def test_malformed_rows_stop_or_are_listed():
    rows = [*rows_of(("a", "1"), ("b", "x"), ("c", "3")), Row(4, None, "is not JSON")]
    with pytest.raises(
        UserError, match=r"FILE:2: the gold 'x' is not an integer \(1 further rows are malformed\)"
    ):
        chosen(rows, "amc")
    selection = chosen(rows, "amc", skip_malformed=True)
    assert [entry["row"] for entry in selection.malformed] == [2, 4]
    assert selection.malformed[1]["reason"] == "is not JSON"
    assert (selection.rows, len(selection.problems)) == (4, 2)


def test_an_id_given_twice_is_refused():
    rows = [Row(n, {"id": "x", "problem": f"p{n}", "answer": "1"}) for n in (1, 2)]
    with pytest.raises(UserError, match="FILE:2: id 'x' is that of row 1"):
        chosen(rows, "jsonl")


def test_a_file_without_a_single_problem_is_refused():
    with pytest.raises(UserError, match="has no problem that can be used; is amc the right source"):
        chosen(rows_of(("a", "x")), "amc", skip_malformed=True)
