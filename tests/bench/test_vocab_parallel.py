"""The command: what it refuses, what it starts, and a small run of all of it."""

import json
import sys

import pytest

from tepo_nemo import cli
from tepo_nemo.bench import vocab_parallel
from tepo_nemo.bench.bounds import slope_bytes
from tepo_nemo.bench.vocab_parallel import Options
from tepo_nemo.launch.local import run_ranks

pytestmark = pytest.mark.timeout(900)  # the small run takes minutes, verl and TRL included


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["bench"], "the following arguments are required: BENCHMARK (see tepo-nemo bench --help)"),
        (
            ["bench", "vocab"],
            "argument BENCHMARK: invalid choice: 'vocab' (choose from 'vocab-parallel', 'step') "
            "(see tepo-nemo bench --help)",
        ),
        (["bench", "vocab-parallel"], "the following arguments are required: --output (see "
         "tepo-nemo bench vocab-parallel --help)"),
        (["--tokens", "many"], "argument --tokens: invalid int value: 'many' (see "
         "tepo-nemo bench vocab-parallel --help)"),
        (["--tokens", "31"], "--tokens 31: must be at least 32"),
        (["--pairs", "2"], "--pairs 2: must be at least 3"),
        (["--tp", "0"], "--tp 0: must be from 1 to "),
        (["--tp", "1", "4096"], "--tp 4096: must be from 1 to "),
        (["--tp", "2", "--vocab", "1001"], "--vocab 1001: must be positive and divisible by --tp 2"),
        (["--vocab", "-2"], "--vocab -2: must be positive and divisible by --tp "),
        (["--output", "full"], "full: the folder is not empty; choose another one, or move it away"),
        (["--output", "full/file"], "full/file: is a file; choose the path of a new folder"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_nothing_starts(capsys, tmp_path, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vocab_parallel.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("tepo_nemo.launch.local.run_ranks", lambda *_, **__: pytest.fail("started"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    if arguments[0] != "bench":
        arguments = [
            "bench",
            "vocab-parallel",
            *([] if "--output" in arguments else ["--output", "new"]),
            *arguments,
        ]
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"tepo-nemo: error: {line}") and output.err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_failed_rank_ends_the_command_without_a_report(tmp_path):
    calls = []

    def fail(command, **options):
        calls.append((command, options))
        return 1

    output = tmp_path / "out"
    assert vocab_parallel.bench(Options(output, tensor_parallel=(1,)), fail, "CONSOLE") == 1
    ((command, options),) = calls
    assert command == [sys.executable, "-m", "tepo_nemo.bench.rank", str(output / "logs/tp1/job.json")]
    assert options == {"ranks": 1, "logs": output / "logs/tp1", "environment": {"OMP_NUM_THREADS": "1"}}
    assert [path.name for path in output.iterdir()] == ["logs"]


def test_a_rank_that_fails_says_why_and_its_process_ends(tmp_path, capsys):
    job = tmp_path / "job.json"
    job.write_text("{}")
    assert run_ranks([sys.executable, "-m", "tepo_nemo.bench.rank", str(job)], ranks=2, logs=tmp_path) == 1
    assert "failed with exit code 1: KeyError: 'cells'" in capsys.readouterr().err


def test_the_default_measures_both_sizes_of_both_vocabularies_and_the_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(vocab_parallel.os, "sched_getaffinity", lambda pid: {0, 1})
    options = Options(tmp_path / "out")
    main, beside, layer, half = options.cells(2)
    assert (main.vocab_size, main.tokens, main.pairs, main.memory_tokens) == (152064, 1024, 15, (256, 1024))
    assert (beside.vocab_size, beside.tokens) == (151936, 256)
    assert [(cell.tokens, cell.hidden_size) for cell in (layer, half)] == [(512, 256), (256, 256)]
    assert [cell.vocab_size for cell in options.cells(1)] == [152064, 151936, 152064]


def test_slope_of_the_peak():
    assert slope_bytes({"peak_process_bytes": {"16": 100, "64": 1060}}) == 20
    assert slope_bytes({"peak_process_bytes": {"64": 1060}}) is None
    assert slope_bytes({}) is None


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    output = tmp_path_factory.mktemp("bench") / "out"
    assert cli.main(["bench", "vocab-parallel", "--quick", "--output", str(output)]) == 0
    return output, json.loads((output / "vocab_parallel.json").read_text(), parse_constant=pytest.fail)


def rows(results, hidden=False):
    cell = next(cell for cell in results["cells"] if (cell["hidden_size"] is not None) == hidden)
    return {
        (name, mode): f for name, row in cell["implementations"].items() for mode, f in row["modes"].items()
    }


# What each puts into collectives at V = 1000 on 2 ranks: (forward, backward, bytes a token forward).
COUNTS = {
    "tepo_nemo": (1, 0, 16),
    "tepo_nemo (overwrite_logits)": (1, 0, 16),
    "tepo_nemo (eager)": (1, 0, 16),
    "torch.logsumexp": (0, 0, 0),
    "NeMo-Aligner": (4, 0, 12 + 500 * 4),  # three numbers a token, and its half of the logits
    "megatron-core": (3, 0, 12),
    "megatron-core fused": (2, 0, 12),
    "verl": (6, 0, 24),
    "verl as used": (6, 0, 24),
}


def test_counts_of_a_small_run(quick):
    found = rows(quick[1])
    assert {name for name, _ in found} >= COUNTS.keys() - {"verl", "verl as used"}
    for (name, mode), figures in found.items():
        counts = (
            figures["collectives_forward"],
            figures["collectives_backward"],
            figures["bytes_per_token_forward"],
        )
        assert counts == COUNTS[name], (name, mode)
        assert figures["bytes_per_token_backward"] == 0


def test_memory_of_a_small_run(quick):
    found = rows(quick[1])
    tokens, logits = 64, 64 * 500 * 4
    for mode in ("log-prob gradient", "both gradients"):
        # Four numbers of 4 bytes a token beyond the logits and targets; others keep a softmax and more.
        assert found["tepo_nemo", mode]["saved_bytes"] == 16 * tokens
        assert found["NeMo-Aligner", mode]["saved_bytes"] >= logits
        # The gradient is one of the two buffers of a chunk, which here is all tokens. Beside them are some
        # twenty numbers a token, and those that Python has not let go of yet.
        assert logits <= found["tepo_nemo (eager)", mode]["peak_tracked_bytes"] <= 3 * logits + 160 * tokens
    for figures in found.values():
        assert figures["peak_process_bytes"]["64"] >= 0
    assert found["tepo_nemo", "no gradient"]["peak_process_bytes"].keys() == {"16", "64"}


def test_errors_of_a_small_run(quick):
    results = quick[1]
    for (name, mode), figures in (rows(results) | rows(results, hidden=True)).items():
        if name.startswith("tepo_nemo"):
            assert figures["ranks_agree"]
            assert max(figures["errors"].values()) <= 2e-6, (name, mode)
    assert rows(results)["NeMo-Aligner", "no gradient"]["errors"]["log-prob, hard tokens"] is None  # log of 0
    assert rows(results)["megatron-core fused", "log-prob gradient"]["errors"]["gradient"] > 1e-4  # bf16


def test_files_of_a_small_run(quick):
    output, results = quick
    assert (output / "vocab_parallel.png").read_bytes().startswith(b"\x89PNG")
    document = (output / "vocab_parallel.md").read_text()
    for name in (
        "floor",
        *(name for name, _ in rows(results)),
        *(each["name"] for each in results["bounds"]),
    ):
        assert f"| {name} |" in document
    assert results["versions"]["nemo-aligner"] == "0.7.0"
    assert results["machine"]["cores"] >= 2
    for (name, _), figures in rows(results).items():
        assert ("ratio" in figures["time"]) == (name != "tepo_nemo")


def test_bounds_that_do_not_depend_on_time_hold_in_a_small_run(quick):
    held = {each["name"]: each["holds"] for each in quick[1]["bounds"]}
    assert held["collectives forward"] and held["collectives backward"] and held["bytes a token and rank"]
    assert all(value for name, value in held.items() if name.startswith(("error of", "peak memory")))
