"""Scores of benchmarks, counted by hand."""

import pytest

from tepo_nemo.evaluation.paper import BENCHMARKS
from tepo_nemo.evaluation.records import AnswerRecord, ProblemRecord
from tepo_nemo.evaluation.report import make_report, render
from tepo_nemo.evaluation.scores import average, averages, score_benchmark


def answer(value=1.0, status="ok", extracted="7", length=10, truncated=False):
    return AnswerRecord("text", extracted, status, value, length, truncated)


def problem(id, *answers, benchmark="b"):
    return ProblemRecord(benchmark, id, "7", answers)


WRONG = answer(0.0, extracted="5")
# 3 problems x 4 answers: 2 / 4, 1 / 4 and 0 / 4 are right.
RECORDS = [
    problem("p0", answer(), answer(length=30), WRONG, answer(0.0, extracted="6")),
    problem("p1", answer(truncated=True), WRONG, WRONG, answer(0.0, "timeout", None)),
    problem("p2", WRONG, *(answer(0.0, status, None) for status in ("unparseable", "error", "timeout"))),
]  # fmt: skip


def test_average_at_k_is_the_mean_over_problems_of_their_mean():
    assert average(RECORDS) == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)


def test_an_answer_that_could_not_be_graded_counts_as_wrong():
    """It stays in the denominator, unlike in training."""
    assert average([problem("p", answer(), answer(0.0, "error"))]) == 0.5


def test_everything_that_is_reported_of_a_benchmark():
    score = score_benchmark(RECORDS, [2])
    assert (score.problems, score.samples) == (3, 4)
    assert score.average.value == pytest.approx(0.25)
    assert score.average.low <= 0.25 <= score.average.high
    # of the 6 pairs of answers, 5 and 3 hold a right one
    assert score.pass_at == pytest.approx({2: (5 / 6 + 3 / 6 + 0) / 3, 4: 2 / 3})
    # p0: 7 7 5 6 is won by 7; p1: 7 5 5 - is won by 5
    assert score.majority_at[4] == pytest.approx(1 / 3)
    # pairs of p0: 7 7 wins, 4 are ties with 7; of p1: 2 are ties, and 7 wins beside the silent one
    assert score.majority_at[2] == pytest.approx(((1 + 4 / 2) / 6 + (2 / 2 + 1) / 6 + 0) / 3)
    assert (score.unparseable, score.timeouts, score.errors) == (1, 2, 1)
    assert score.mean_length == pytest.approx((11 * 10 + 30) / 12)
    assert score.truncated == pytest.approx(1 / 12)


def test_a_greedy_benchmark_has_its_average_alone():
    score = score_benchmark([problem("p", answer())])
    assert (score.pass_at, score.majority_at) == ({}, {})
    assert (score.average.low, score.average.value, score.average.high) == (1, 1, 1)


def test_a_k_above_the_samples_is_refused():
    with pytest.raises(ValueError, match="k is 5 and there are 4 samples"):
        score_benchmark(RECORDS, [5])


def test_both_averages():
    """12 answers with 3 right, and one answer that is right: 4 of 13, and the mean of 1/4 and 1."""
    both = averages({"b": RECORDS, "c": [problem("p", answer(), benchmark="c")]})
    assert both.generations == 13
    assert both.over_generations.value == pytest.approx(4 / 13)
    assert both.over_benchmarks.value == pytest.approx((1 / 4 + 1) / 2)


REPORT = make_report(
    {"amc": RECORDS, "mine": [problem("p", answer(), benchmark="mine")]},
    {"amc": [2], "mine": []},
    {"amc": {"p0", "elsewhere"}, "mine": {"p"}},
)


def test_a_report_without_the_problems_of_the_training_set():
    assert REPORT.clean["amc"].average.value == pytest.approx((1 / 4 + 0) / 2)
    assert REPORT.clean["mine"] is None
    assert REPORT.clean_averages is None  # one benchmark has nothing left
    json = REPORT.to_json()
    assert json["benchmarks"]["amc"]["without_overlap"]["problems"] == 2
    assert json["benchmarks"]["mine"]["without_overlap"] is None
    assert json["averages"]["over_benchmarks"]["value"] == pytest.approx((1 / 4 + 1) / 2)


def test_the_table_is_in_the_papers_layout_beside_its_rows():
    table = render(REPORT, "qwen2_5_7b").split("\n\n")[1].splitlines()
    assert table[0].split() == ["%", "AMC", "mine", "Avg,", "generations", "Avg,", "benchmarks"]
    assert table[1].split()[:5] == ["this", "model", "25.00", "100.00", "30.77"]
    assert table[2].split() == ["without", "overlap", "12.50", "-", "-", "-"]
    base = next(line for line in table if "base" in line)
    assert base.split()[-4:] == ["14.34", "-", "-", "-"]  # averages over other benchmarks are not comparable
    assert len(table) == 3 + 15


def test_the_papers_averages_stand_beside_those_of_all_its_benchmarks():
    """The mean of the seven columns of its first row is 111.58 / 7."""
    report = make_report(
        {name: RECORDS for name in reversed(BENCHMARKS)},
        {name: [] for name in BENCHMARKS},
        {name: set() for name in BENCHMARKS},
    )
    header, ours, *_, base = render(report, "qwen2_5_7b").split("\n\n")[1].splitlines()[:4]
    assert header.split()[1:8] == [benchmark.label for benchmark in BENCHMARKS.values()]
    assert base.split()[-9:] == "0.94 0.94 14.34 43.20 13.73 16.74 21.69 13.30 15.94".split()
    assert ours.split()[2:9] == ["25.00"] * 7


@pytest.mark.parametrize(("model", "rows"), [("mistral_7b_instruct", 3), ("toy", 15)])
def test_the_rows_are_those_of_the_model_or_of_the_papers_main_one(model, rows):
    assert render(REPORT, model).count("paper: ") == rows


def test_other_benchmarks_than_the_papers_stand_alone():
    report = make_report({"mine": RECORDS}, {"mine": []}, {"mine": set()})
    assert "paper" not in render(report, "toy")
    assert "3 x 4" in render(report, "toy")
