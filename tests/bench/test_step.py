"""`tepo-nemo bench step`: what it counts of a small run, what it writes, and what it refuses."""

import json
import os
import sys
from pathlib import Path

import pytest

from tepo_nemo import cli
from tepo_nemo.bench.step import command
from tepo_nemo.bench.step.command import QUICK, Options
from tepo_nemo.bench.step.names import (
    ALIGNER,
    BALANCE,
    COMPACTION,
    FIRST,
    LEVERS,
    OURS,
    OVERLAP,
    PREFIX,
    SCALED,
    SINGLE,
)
from tepo_nemo.bench.step.workload import Workload
from tepo_nemo.launch.local import run_ranks

pytestmark = pytest.mark.timeout(900)  # the small run takes minutes on a busy machine
RESPONSES, TOKENS, UPDATES, LONGEST = 8, 35, 4, 13  # of the small run, see test_step_counting


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--model", "huge"], "--model huge: is not one of toy, wide"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--output", "full"], "full: the folder is not empty"),
        (["--turbo"], "unknown argument --turbo"),
    ],
)
def test_mistakes(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("tepo_nemo.launch.local.run_ranks", lambda *_, **__: pytest.fail("started"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    output = [] if "--output" in arguments else ["--output", "new"]
    assert cli.main(["bench", "step", *output, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"tepo-nemo: error: {line}") and printed.err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_one_core_is_too_few(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert cli.main(["bench", "step", "--output", str(tmp_path / "new")]) == 2
    assert "needs 2 cores" in capsys.readouterr().err


def test_a_failed_rank_ends_the_command_without_a_report(tmp_path):
    calls = []

    def fail(command, **options):
        calls.append((command, options))
        return 1

    output = tmp_path / "out"
    assert command.bench(Options(output, **QUICK), fail, "CONSOLE") == 1
    ((line, options),) = calls
    assert line == [sys.executable, "-m", "tepo_nemo.bench.step.rank", str(output / "logs/tp2/job.json")]
    assert options == {"ranks": 2, "logs": output / "logs/tp2", "environment": {"OMP_NUM_THREADS": "1"}}
    assert [path.name for path in output.iterdir()] == ["logs"]


def test_a_rank_that_fails_says_why(tmp_path, capsys):
    job = tmp_path / "job.json"
    job.write_text("{}")
    ranks = [sys.executable, "-m", "tepo_nemo.bench.step.rank", str(job)]
    assert run_ranks(ranks, ranks=2, logs=tmp_path) == 1
    assert "failed with exit code 1: KeyError: 'cases'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> tuple[Path, dict]:
    output = tmp_path_factory.mktemp("bench") / "out"
    assert cli.main(["bench", "step", "--quick", "--output", str(output)]) == 0
    return output, json.loads((output / "step.json").read_text(), parse_constant=pytest.fail)


def work_of(case: dict) -> Workload:
    return Workload(**case["workload"])


def needed(work: Workload) -> int:
    """Positions that trained tokens need: 8 responses of 35 tokens, two to each prompt."""
    return 2 * sum(work.prompt_lengths()) + TOKENS - RESPONSES


def sequences(work: Workload) -> list[int]:
    """Prompt and response of each."""
    return [
        prompt + length
        for prompt, limits in zip(work.prompt_lengths(), work.limits, strict=True)
        for length in limits
    ]


@pytest.mark.parametrize(("case", "tokens"), [("toy-skewed", TOKENS), ("toy-equal", 8 * 4)])
def test_all_rows_train_on_the_same_tokens(quick, case, tokens):
    rows = quick[1]["cases"][case]["rows"]
    assert {ALIGNER, OURS, SINGLE} <= rows.keys()
    assert {row["trained_tokens"] for row in rows.values()} == {tokens}
    assert {row["updates"] for row in rows.values()} == {UPDATES}


def test_passes_a_response(quick):
    cases = quick[1]["cases"]
    rows = cases["toy-skewed"]["rows"]
    assert rows[ALIGNER]["passes"] == 2  # the old pass and the training pass
    assert rows[OURS]["passes"] == rows[SINGLE]["passes"] == 1 + 3 / 4  # the first is spared
    assert rows[FIRST]["passes"] == 2
    assert cases["toy-one-update"]["rows"][OURS]["passes"] == 1


def test_padding(quick):
    case = quick[1]["cases"]["toy-skewed"]
    work, rows = work_of(case), case["rows"]
    longest = max(sequences(work))
    assert rows[SINGLE]["padding"] == 0
    assert rows[BALANCE]["padding"] == pytest.approx(1 - needed(work) / (RESPONSES * (longest - 1)))
    # It feeds the last token too, whose output nobody needs.
    assert rows[ALIGNER]["padding"] == pytest.approx(1 - needed(work) / (RESPONSES * longest))
    assert rows[OURS]["padding"] < rows[BALANCE]["padding"]


def test_positions_that_generation_feeds(quick):
    case = quick[1]["cases"]["toy-skewed"]
    work, rows = work_of(case), case["rows"]
    prompts, drawn = sum(work.prompt_lengths()), TOKENS - RESPONSES  # the last token is not fed again
    assert rows[OURS]["generated_positions"] == prompts + drawn
    assert rows[PREFIX]["generated_positions"] == 2 * prompts + drawn
    assert rows[COMPACTION]["generated_positions"] == prompts + RESPONSES * (LONGEST - 1)


def test_both_generations_give_the_same_greedy_responses(quick):
    generation = quick[1]["cases"]["toy-skewed"]["generation"]
    assert generation["equal"]
    assert generation["tokens"] == TOKENS


def test_copies_of_the_model(quick):
    rows = quick[1]["cases"]["toy-copies"]["rows"]
    assert (rows[OURS]["passes"], rows[OURS]["trained_tokens"]) == (1 + 3 / 4, TOKENS)
    # Each of the two ranks trains on the whole batch.
    assert (rows[ALIGNER]["passes"], rows[ALIGNER]["trained_tokens"]) == (4, 2 * TOKENS)
    assert rows[BALANCE]["imbalance"] == 0  # all are padded to one length


def test_imbalance_of_copies_with_one_response_each(quick):
    case = quick[1]["cases"]["toy-copies"]
    # A token of the toy's layer: 8 x 128^2 + 6 x 128 x 512, and 4 x 128 for each position that it looks at.
    work = [(length - 1) * (524288 + 512 * (length - 1)) for length in sequences(work_of(case))]
    waited_for = sum(max(work[start : start + 2]) for start in range(0, RESPONSES, 2))  # an update a prompt
    assert case["rows"][OURS]["imbalance"] == pytest.approx(2 * waited_for / sum(work) - 1)


def test_long_responses_have_bounds_on_padding_and_load(quick):
    cases, bounds = quick[1]["cases"], {bound["name"]: bound for bound in quick[1]["bounds"]}
    for name in ("toy-long", "toy-long-copies"):
        rows = cases[name]["rows"]
        bound = bounds[f"{name}: padding of trained positions"]
        assert bound["holds"] == (rows[OURS]["padding"] < 0.05)
        assert (
            bound["figure"]
            == f"{rows[OURS]['padding']:.1%} (padded to the longest: {rows[BALANCE]['padding']:.1%})"
        )
    assert bounds["toy-long-copies: load imbalance"]["figure"] == f"{rows[OURS]['imbalance']:.1%}"
    assert "toy-long: load imbalance" not in bounds  # of one copy


def test_scaled_work(quick):
    rows = quick[1]["cases"]["toy-scaling"]["rows"]
    assert set(rows) == {OURS, *SCALED}
    for name in SCALED:
        assert 1.5 < rows[name]["trained_tokens"] / TOKENS < 2.5


def test_files(quick):
    output, results = quick
    assert (output / "step.png").read_bytes().startswith(b"\x89PNG")
    document = (output / "step.md").read_text()
    rows = [ALIGNER, OURS, SINGLE, *SCALED, *(f"without: {lever}" for lever in (*LEVERS, OVERLAP))]
    for name in (*rows, *(bound["name"] for bound in results["bounds"])):
        assert f"| {name} |" in document
    assert results["versions"]["nemo-aligner"] == "0.7.0"


def test_seconds_add_up(quick):
    for case in quick[1]["cases"].values():
        for row in case["rows"].values():
            if case["rounds"]:
                seconds = dict(row["seconds"])
                assert seconds.pop("step") == pytest.approx(sum(seconds.values()), rel=0.05)


def test_bounds_that_do_not_depend_on_time_hold(quick):
    held = {bound["name"]: bound["holds"] for bound in quick[1]["bounds"]}
    assert held["toy-skewed: forward passes a response, updates: 4"]
    assert held["toy-one-update: forward passes a response, updates: 1"]
    assert held["toy-skewed: greedy responses"]
