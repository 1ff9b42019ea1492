"""`tepo-nemo eval` without the heavy stack: what it evaluates, what it starts, what it refuses."""

import sys
from pathlib import Path

import pytest
from support.toy_files import make_archive, make_math_files, make_toy_files

from tepo_nemo import cli
from tepo_nemo.config.load import load_config
from tepo_nemo.errors import UserError
from tepo_nemo.launch import evaluate as launch_evaluate
from tepo_nemo.runs.checkpoints import Manifest


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_toy_files(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """The calls that would have started ranks; they return 0."""
    calls = []

    def record(command, **options):
        calls.append((command, options))
        return 0

    monkeypatch.setattr(launch_evaluate, "run_ranks", record)
    return calls


@pytest.fixture
def run(folder):
    """A run directory with two checkpoints, at TP2."""
    from tepo_nemo.config.load import dump_config
    from tepo_nemo.runs.directory import RunDirectory

    run = RunDirectory.create(folder / "run", dump_config(load_config(["experiment=toy_cpu", "output=run"])))
    for step in (9, 10):
        make_archive(run.checkpoints / f"step_{step:06d}.nemo")
    return run


def error_line(capsys, *arguments):
    assert cli.main(["eval", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err.removeprefix("tepo-nemo: error: ").rstrip("\n")


def configured(path):
    return load_config(config_file=Path(path) / "config.yaml")


def test_a_run_is_evaluated_at_its_last_checkpoint_on_its_own_layout(folder, run, started):
    assert cli.main(["eval", "--checkpoint", "run"]) == 0
    ((command, options),) = started
    output = folder / "run" / "evaluation"
    assert command == [
        sys.executable, "-m", "tepo_nemo.launch.rank", "--evaluate", "--config", str(output / "config.yaml")
    ]  # fmt: skip
    assert options == {"ranks": 2, "logs": output / "logs", "environment": {"OMP_NUM_THREADS": "1"}}
    config = configured(output)
    assert config.model.restore_from_path == run.checkpoints / "step_000010.nemo"
    assert [entry.name for entry in config.data.evaluation] == ["toy", "toy_greedy"]


def test_a_run_that_is_not_done_is_evaluated_at_its_newest_complete_checkpoint(folder, run, started):
    for name, complete in (("step_000010_update_002", True), ("step_000011", False)):
        (run.checkpoints / name).mkdir()
        if complete:
            (run.checkpoints / name / "manifest.json").write_text(Manifest(10, 2, "", None, {}).to_json())
    assert cli.main(["eval", "--checkpoint", "run"]) == 0
    config = configured(folder / "run" / "evaluation")
    assert config.model.restore_from_path == run.checkpoints / "step_000010_update_002"


def test_a_checkpoint_alone_and_one_benchmark(folder, started):
    cli.main(
        [
            "eval",
            "--checkpoint",
            "toy/warm_start.nemo",
            "--benchmarks",
            "toy_greedy",
            "output=scores",
            "seed=3",
        ]
    )
    config = configured("scores")
    assert config.model.restore_from_path == folder / "toy" / "warm_start.nemo"
    assert ([entry.name for entry in config.data.evaluation], config.seed) == (["toy_greedy"], 3)
    assert started[0][1]["ranks"] == 1


def test_the_papers_benchmarks(folder, started):
    make_math_files(folder)
    options = ["data=math", "model.encoder_seq_length=10240", "output=scores", "data.reward=exact_answer"]
    cli.main(["eval", "--checkpoint", "toy/warm_start.nemo", "--benchmarks", "minerva,amc", *options])
    entries = configured("scores").data.evaluation
    assert [(entry.name, entry.samples, entry.temperature) for entry in entries] == [
        ("amc", 32, 0.6),
        ("minerva", 1, 0.0),
    ]


def test_the_same_evaluation_goes_on_at_any_layout_and_another_is_refused(capsys, folder, started):
    again = ["--checkpoint", "toy/warm_start.nemo", "output=scores"]
    assert cli.main(["eval", *again]) == 0
    (folder / "scores" / "problems.jsonl").write_text("kept\n")
    layout = ["hardware.devices_per_node=2", "model.tensor_model_parallel_size=2", "rollout.batch_size=9"]
    assert cli.main(["eval", *again, *layout]) == 0
    assert [options["ranks"] for _, options in started] == [1, 2]
    for override, name in (
        ("seed=2", "seed 1"),
        ("data.evaluation.0.samples=5", "benchmarks"),
        ("rollout.max_response_length=9", "max_response_length 8"),
    ):
        assert f"scores: is an evaluation with {name}" in error_line(capsys, *again, override)
    (folder / "toy" / "test.jsonl").write_text('{"id": "1", "prompt": "1+2=", "gold": "3"}\n')
    assert "is an evaluation with benchmarks" in error_line(capsys, *again)
    assert len(started) == 2
    assert (folder / "scores" / "problems.jsonl").read_text() == "kept\n"


MISTAKES = [
    (["--checkpoint", "none.nemo"], "--checkpoint=none.nemo: no such .nemo file or run directory"),
    ([], "model.restore_from_path=null: there is nothing to evaluate"),
    (["data.evaluation=[]"], "data.evaluation=[]: there is no benchmark"),
    (["--benchmarks", "toy_greed"], "--benchmarks toy_greed: is not in data.evaluation; did you mean"),
    (["data.evaluation.0.k=[5]"], "data.evaluation.0.k=[5]: 5 is more than the 4 samples of toy"),
    (["data.evaluation.0.k=[0]"], "data.evaluation.0.k.0=0: must be at least 1"),
    (["data.evaluation.0.answer_form=text"], "data.evaluation.0.answer_form=text: must be one of expression"),
    (["data.evaluation.0.path=none.jsonl"], "data.evaluation.0.path="),
    (["data.reward=exact_answr"], "data.reward=exact_answr is unknown"),
    (["hardware.nodes=2"], "hardware.nodes=2: this command starts the ranks of one machine"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "line"), MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_left_behind(capsys, folder, started, arguments, line):
    before = sorted(folder.rglob("*"))
    checkpoint = (
        ["--checkpoint", "toy/warm_start.nemo"] if arguments and "--checkpoint" not in arguments else []
    )
    assert error_line(capsys, *checkpoint, "output=scores", *arguments).startswith(line)
    assert sorted(folder.rglob("*")) == before
    assert not started


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "has no prompts"),
        (b'{"id": "1", "prompt": "1+1=", "gold": "2"}\n{"id": "1", "prompt"', ":2: is not JSON"),
        (b'{"id": "1", "prompt": "1+1=", "gold": "2"}\n' * 2, ":2: id '1' is that of line 1"),
        (b'{"id": "1", "problem": "1+1=", "gold": "2"}\n', ":1: has no field 'prompt'"),
        (b'{"id": "1", "prompt": "1+1="}\n', ":1: has no field 'gold'"),
        (b'{"id": "1", "prompt": "1+1=\xff", "gold": "2"}\n', ":1: byte 27 is not UTF-8"),
    ],
    ids=["empty", "truncated", "duplicate id", "wrong column", "missing gold", "not UTF-8"],
)
def test_a_broken_benchmark_is_one_line_and_nothing_is_left_behind(capsys, folder, started, content, line):
    (folder / "toy" / "test.jsonl").write_bytes(content)
    message = error_line(capsys, "--checkpoint", "toy/warm_start.nemo", "output=scores")
    assert message.startswith(f"{folder}/toy/test.jsonl")
    assert line in message
    assert not (folder / "scores").exists()
    assert not started


def test_a_run_without_a_checkpoint_is_refused(capsys, run, started):
    for path in run.checkpoints.iterdir():
        path.unlink()
    assert error_line(capsys, "--checkpoint", "run") == (
        "--checkpoint=run: the run has saved no checkpoint; give another one"
    )


def test_an_evaluation_does_not_go_into_a_run(capsys, run):
    checkpoint = "run/checkpoints/step_000009.nemo"
    assert "is not empty" in error_line(capsys, "--checkpoint", checkpoint, "output=run")


def test_a_mistake_that_only_the_ranks_find_is_one_line_and_leaves_nothing(capsys, folder, monkeypatch):
    def refuse(*_, logs: Path, **__):
        (logs / "rank_0.log").write_text("noise")
        raise UserError("data.evaluation=test.jsonl: prompt '1' has no tokens")

    monkeypatch.setattr(launch_evaluate, "run_ranks", refuse)
    arguments = ["--checkpoint", "toy/warm_start.nemo", "output=scores"]
    assert error_line(capsys, *arguments) == "data.evaluation=test.jsonl: prompt '1' has no tokens"
    assert not (folder / "scores").exists()
