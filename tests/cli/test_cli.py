"""The `tepo-nemo` command without the heavy stack: what it refuses, what it prints, what it starts."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
from support.study_runs import write_study
from support.toy_files import make_toy_files

from tepo_nemo import cli
from tepo_nemo.config.load import load_config
from tepo_nemo.errors import UserError
from tepo_nemo.launch import run as launch_run
from tepo_nemo.runs.summary import write_summary
from tepo_nemo.study import command as study_command
from tepo_nemo.study.run import Outcome


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_toy_files(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch):
    """The calls that would have started ranks; they return 0."""
    calls = []

    def record(command, **options):
        calls.append((command, options))
        return 0

    monkeypatch.setattr(launch_run, "run_ranks", record)
    return calls


def error_line(capsys, *arguments: str) -> str:
    """The one line of a command that ends with exit code 2."""
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("tepo-nemo: error: ")
    return output.err.removeprefix("tepo-nemo: error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: COMMAND (see tepo-nemo --help)"),
        (
            ["trian"],
            "argument COMMAND: invalid choice: 'trian' "
            "(choose from 'train', 'validate', 'plan', 'submit', 'eval', 'plot', "
            "'study', 'grade', 'bench', 'prepare-data', 'convert', 'doctor') "
            "(see tepo-nemo --help)",
        ),
        (["train", "--dry"], "unknown argument --dry (see tepo-nemo --help)"),
        (["plot"], "the following arguments are required: RUN (see tepo-nemo plot --help)"),
        (["plot", "a", "b"], "unknown argument b (see tepo-nemo --help)"),
        (["train", "--config"], "argument --config: expected one argument (see tepo-nemo train --help)"),
        (
            ["prepare-data", "toy"],
            "the following arguments are required: --output (see tepo-nemo prepare-data toy --help)",
        ),
    ],
)
def test_wrong_arguments_are_one_line(capsys, arguments, line):
    assert error_line(capsys, *arguments) == line


MISTAKES = [
    ("rollout.prompt_per_step=3", "rollout.prompt_per_step: unknown key"),
    ("rollout.responses_per_prompt=1", "rollout.responses_per_prompt=1: must be at least 2"),
    ("trainer.updates_per_rollout=7", "trainer.updates_per_rollout=7: must divide"),
    ("model.tensor_model_parallel_size=3", "model.tensor_model_parallel_size=3: must divide"),
    ("model.pipeline_model_parallel_size=4", "model.pipeline_model_parallel_size=4: is more stages"),
    ("model.restore_from_path=none.nemo", "model.restore_from_path="),
    ("data.train=none.jsonl", "data.train="),
    ("model.context_parallel_size=2", "model.context_parallel_size=2: needs context parallelism"),
    ("data.reward=exact_answr", "data.reward=exact_answr"),
]


@pytest.mark.parametrize("command", ["train", "validate"])
@pytest.mark.parametrize(("override", "line"), MISTAKES)
def test_bad_input_is_one_line_and_nothing_is_left_behind(capsys, folder, started, command, override, line):
    before = sorted(folder.rglob("*"))
    assert error_line(capsys, command, override).startswith(line)
    assert sorted(folder.rglob("*")) == before
    assert not started


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.clip_low=wide", "algorithm.clip_low"),
        ("algorithm.name=tpo", "algorithm.name"),
        ("algorithm.surrogate=pppo", "algorithm.surrogate"),
        ("hardware.nodes=2", "hardware.nodes=2: this command starts the ranks of one machine"),
    ],
)
def test_what_only_training_can_tell_is_refused_before_a_rank_starts(capsys, folder, started, override, line):
    before = sorted(folder.rglob("*"))
    assert error_line(capsys, "train", override).startswith(line)
    assert sorted(folder.rglob("*")) == before
    assert not started


@pytest.mark.parametrize("content", ["", "{}\n", '{"id": "1", "prompt": "", "gold": "2"}\n', "no json\n"])
@pytest.mark.parametrize("name", ["train", "test"])
def test_an_empty_or_broken_prompt_set_is_refused_before_a_rank_starts(
    capsys, folder, started, name, content
):
    (folder / "toy" / f"{name}.jsonl").write_text(content)
    assert f"{folder}/toy/{name}.jsonl" in error_line(capsys, "train")
    assert not (folder / "runs").exists()
    assert not started


def test_train_starts_the_ranks_of_the_layout_on_a_saved_configuration(folder, started):
    assert cli.main(["train", "experiment=toy_cpu", "output=run"]) == 0
    ((command, options),) = started
    assert command == [
        sys.executable,
        "-m",
        "tepo_nemo.launch.rank",
        "--config",
        str(folder / "run/config.yaml"),
    ]
    assert options == {"ranks": 2, "logs": folder / "run/logs", "environment": {"OMP_NUM_THREADS": "1"}}
    assert load_config(config_file=folder / "run/config.yaml") == load_config(
        ["experiment=toy_cpu", "output=run"]
    )
    assert (folder / "run/logs").is_dir()


def test_train_from_a_saved_configuration(folder, started):
    cli.main(["train", "experiment=toy_cpu", "output=run"])
    # overrides on both sides of the option
    assert cli.main(["train", "seed=4", "--config", "run/config.yaml", "output=again"]) == 0
    again = load_config(config_file=folder / "again/config.yaml")
    assert again == load_config(["experiment=toy_cpu", "seed=4", "output=again"])


def test_train_does_not_overwrite_a_run(capsys, folder, started):
    (folder / "run").mkdir()
    (folder / "run/metrics.jsonl").write_text("{}")
    assert f"{folder}/run" in error_line(capsys, "train", "output=run")
    assert [path.name for path in (folder / "run").iterdir()] == ["metrics.jsonl"]
    assert not started


def test_the_same_command_goes_on(folder, started):
    for _ in range(2):
        assert cli.main(["train", "experiment=toy_cpu", "output=run"]) == 0
        (folder / "run/metrics.jsonl").write_text("{}")
    assert cli.main(["train", "--config", "run/config.yaml", "trainer.max_steps=80"]) == 0
    assert len(started) == 3
    assert load_config(config_file=folder / "run/config.yaml").trainer.max_steps == 80


def test_a_finished_run_says_so(capsys, folder, started):
    cli.main(["train", "experiment=toy_cpu", "output=run"])
    values = dict(reward_first=0.1, reward_last=0.9, eval_before=None, eval_after=None, wall_s=1.0)
    write_summary(folder / "run/summary.json", steps=72, status="done", **values)
    assert cli.main(["train", "experiment=toy_cpu", "output=run"]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}/run: the run is finished, with 72 steps")
    assert len(started) == 1
    assert cli.main(["train", "experiment=toy_cpu", "output=run", "trainer.max_steps=73"]) == 0
    assert len(started) == 2


def test_a_run_does_not_go_on_as_another_one(capsys, folder, started):
    cli.main(["train", "experiment=toy_cpu", "output=run"])
    line = error_line(capsys, "train", "experiment=toy_cpu", "output=run", "algorithm.clip_low=0.1")
    assert line.startswith(f"algorithm.clip_low=0.1: the run in {folder}/run has algorithm.clip_low=0.2")
    assert len(started) == 1


def test_exit_code_of_the_ranks_is_that_of_the_command(folder, monkeypatch):
    for number, code in enumerate((0, 1, 3)):
        monkeypatch.setattr(launch_run, "run_ranks", lambda *_, code=code, **__: code)
        assert cli.main(["train", f"output=run{number}"]) == code
        assert (folder / f"run{number}/config.yaml").exists()  # the log of a failure is worth keeping


def test_a_mistake_that_only_the_ranks_find_is_one_line_and_leaves_nothing(capsys, folder, monkeypatch):
    def refuse(*_, logs: Path, **__):
        (logs / "rank_0.log").write_text("noise")
        raise UserError("model.encoder_seq_length=64: a prompt has 70 tokens")

    monkeypatch.setattr(launch_run, "run_ranks", refuse)
    assert error_line(capsys, "train", "output=run") == "model.encoder_seq_length=64: a prompt has 70 tokens"
    assert not (folder / "run").exists()


def test_validate_prints_the_layout_and_makes_nothing(capsys, folder):
    before = sorted(folder.rglob("*"))
    assert cli.main(["validate", "experiment=toy_cpu"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[:2] == ["valid", "ranks      2 = 2 tensor x 1 pipeline x 1 data"]
    assert output.err == ""
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("outcome", "code", "line"),
    [
        (Outcome(False, []), 0, ""),
        (Outcome(True, []), 3, "tepo-nemo: error: stopped; the same command runs the cells that are left\n"),
        (
            Outcome(False, ["A, seed 1", "B, seed 2"]),
            1,
            "tepo-nemo: error: failed: A, seed 1; B, seed 2 (see above)\n",
        ),
    ],
)
def test_exit_code_of_a_study(capsys, monkeypatch, outcome, code, line):
    calls = []

    def run_study(path, output, launcher, *, only, run):
        calls.append((path, output, launcher.train, only, run))
        cells = [types.SimpleNamespace(name=name) for name in outcome.failed]
        return Outcome(outcome.interrupted, cells)

    monkeypatch.setattr(study_command, "run_study", run_study)
    assert cli.main(["study", "s.yaml", "--output", "out", "--only", "A", "B C", "--report-only"]) == code
    assert capsys.readouterr().err == line
    train = [sys.executable, "-m", "tepo_nemo.cli", "train", "--config"]
    assert calls == [(Path("s.yaml"), Path("out"), train, ["A", "B C"], False)]


def test_a_study_checks_its_runs_as_train_does(capsys, folder, started):
    """What only training can tell, for the second experiment; nothing is left behind."""
    write_study(
        folder / "s.yaml",
        experiments=[
            {"label": "A"},
            {"label": "B", "overrides": ["algorithm=mpo", "algorithm.next_weight=0.9"]},
        ],
    )
    before = sorted(folder.rglob("*"))
    assert error_line(capsys, "study", "s.yaml", "--output", "out").startswith(
        "B: algorithm.weight_decay = 0.8: leaves the token itself a weight of"
    )
    assert error_line(capsys, "study", "none.yaml", "--output", "out").startswith(
        "none.yaml: there is no such"
    )
    assert sorted(folder.rglob("*")) == before
    assert not started


def test_plot_prints_what_it_has_drawn(capsys, monkeypatch):
    plots = types.ModuleType("tepo_nemo.runs.plots")
    plots.plot_run = lambda run: [run / "plots" / "reward.png"]
    monkeypatch.setitem(sys.modules, "tepo_nemo.runs.plots", plots)
    assert cli.main(["plot", "runs/toy"]) == 0
    assert capsys.readouterr().out == "runs/toy/plots/reward.png\n"


TASKS = ["toy", "chain"]


@pytest.mark.parametrize("task", TASKS)
def test_prepare_data_makes_all_that_the_experiment_of_the_task_names(capsys, folder, task):
    assert cli.main(["prepare-data", task, "--output", "made"]) == 0
    assert capsys.readouterr().out == "made\n"
    (folder / task).rename(folder / "old")
    (folder / "made").rename(folder / task)
    assert cli.main(["validate", f"experiment={task}_cpu", "model.restore_from_path=null"]) == 0


@pytest.mark.parametrize("task", TASKS)
def test_prepared_tokenizer_has_the_vocabulary_of_the_model(folder, task):
    from transformers import AutoTokenizer

    cli.main(["prepare-data", task, "--output", "made"])
    model = load_config([f"experiment={task}_cpu"]).model
    assert len(AutoTokenizer.from_pretrained(folder / "made/tokenizer")) == model.vocab_size
    assert model.tokenizer.type.endswith(f"{task}/tokenizer")


@pytest.mark.parametrize("task", TASKS)
def test_prepare_data_without_transformers_makes_nothing(capsys, folder, monkeypatch, task):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = error_line(capsys, "prepare-data", task, "--output", "made")
    assert line.startswith(f"prepare-data {task}: needs")
    assert not (folder / "made").exists()


def test_prepare_data_does_not_overwrite(capsys, folder):
    (folder / "toy/train.jsonl").write_text("mine")
    error_line(capsys, "prepare-data", "toy", "--output", "toy")
    assert (folder / "toy/train.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["eval"],
        ["validate"],
        ["plot"],
        ["study"],
        *(["prepare-data", name] for name in (*TASKS, "math")),
    ],  # fmt: skip
)
def test_help_says_examples_and_exit_codes(capsys, arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "exit codes:\n  0  done\n" in text
    assert not arguments or f"tepo-nemo {' '.join(arguments)}" in text.partition("examples:")[2]


def test_interrupted_before_the_ranks_run(capsys, monkeypatch):
    def interrupt(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch_run, "start_local_run", interrupt)
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "tepo-nemo: error: interrupted\n"
