"""The paper's printed averages, recomputed from its own columns."""

import pytest

from tepo_nemo.config.load import load_config
from tepo_nemo.evaluation.paper import BENCHMARKS, ROWS, average_over_generations

# The rows that do not come out of their columns: what the columns give minus what is printed.
OFF = {
    ("qwen2_5_7b", "TEPO, KL on all tokens, 0.1"): 2.522,
    ("qwen2_5_7b", "TEPO, 72 steps, seed 1"): 0.408,
    ("r1_distill_llama_8b", "TEPO"): -0.339,
    ("r1_distill_llama_8b", "GRPO/DAPO"): 0.281,
    ("qwen2_5_7b", "GRPO/DAPO, 72 steps, seed 1"): 0.192,
    ("qwen2_5_7b", "TEPO, KL on all tokens, 0.01"): -0.062,
}


def test_the_paper_asks_8834_times():
    counts = [benchmark.generations for benchmark in BENCHMARKS.values()]
    assert counts == [960, 960, 2656, 500, 2811, 675, 272]
    assert sum(counts) == 8834


def test_every_row_has_every_column_and_stands_once():
    assert all(len(row.scores) == len(BENCHMARKS) for row in ROWS)
    assert len({(row.model, row.method) for row in ROWS}) == len(ROWS) == 21


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}, {row.method}")
def test_printed_average_is_the_mean_over_generations(row):
    off = average_over_generations(row.scores) - row.average
    if (row.model, row.method) in OFF:
        assert off == pytest.approx(OFF[row.model, row.method], abs=0.001)
    else:
        assert abs(off) <= 0.03


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}, {row.method}")
def test_no_printed_average_is_the_mean_over_benchmarks(row):
    """Whatever is printed is not that: it would be off by more than the worst row but one."""
    printed = [score for score in row.scores if score is not None]
    assert abs(sum(printed) / len(printed) - row.average) > 0.2


def test_twelve_of_the_eighteen_whole_rows_come_out():
    whole = [row for row in ROWS if None not in row.scores]
    right = [row for row in whole if abs(average_over_generations(row.scores) - row.average) <= 0.03]
    assert (len(whole), len(right)) == (18, 12)


def test_the_shipped_configuration_asks_as_the_paper_does(tmp_path, monkeypatch):
    from support.toy_files import make_math_files, make_toy_files

    monkeypatch.chdir(tmp_path)
    make_toy_files(tmp_path)
    make_math_files(tmp_path)
    entries = load_config(["data=math", "model.encoder_seq_length=10240"]).data.evaluation
    assert {entry.name: (entry.samples, entry.temperature) for entry in entries} == {
        name: (benchmark.samples, benchmark.temperature) for name, benchmark in BENCHMARKS.items()
    }
