"""`run_study` with a small program in the place of training: what runs, what resumes, what is told."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import PATIENCE_S, is_alive, wait_until
from support.study_runs import write_study

from tepo_nemo.errors import UserError
from tepo_nemo.launch.local import describe_failure
from tepo_nemo.launch.pool import run_jobs
from tepo_nemo.study.command import run_study
from tepo_nemo.study.run import Launcher

# Leaves what a run leaves, and a line in starts.txt; fails, lies or waits where a file of its name says so.
TRAIN = """
import json, os, pathlib, sys, time
config = pathlib.Path(sys.argv[1]).read_text()
output = pathlib.Path(sys.argv[1]).with_suffix("")
name = f"{output.parent.name}-{output.name}"
with open("starts.txt", "a") as starts:
    starts.write(f"{name} {os.getpid()}\\n")
output.mkdir()
(output / "config.yaml").write_text(config)
rows = [{"step": 1, "reward/mean": 0.25}, {"step": 2, "reward/mean": 0.75}]
(output / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
while os.path.exists(f"wait-{name}"):
    time.sleep(0.05)
if os.path.exists(f"fail-{name}"):
    print("tepo-nemo: error: the loss is not finite", file=sys.stderr)
    sys.exit(1)
summary = dict(eval_before=None, eval_after={"toy": 0.5}, wall_s=1.0)
summary["status"] = "failed" if os.path.exists(f"lie-{name}") else "done"
(output / "summary.json").write_text(json.dumps(summary) + "\\n")
"""
ALL = ["grpo-dapo-seed_1", "grpo-dapo-seed_2", "tepo-seed_1", "tepo-seed_2"]


@pytest.fixture
def launcher(folder) -> Launcher:
    (folder / "train.py").write_text(TRAIN)
    train = [sys.executable, str(folder / "train.py")]
    return Launcher(lambda config: None, train, run_jobs, describe_failure)


@pytest.fixture
def study(folder) -> Path:
    return write_study(folder / "s.yaml", base=["data.evaluation=[{name: toy, path: toy/test.jsonl}]"])


def starts(folder: Path) -> list[str]:
    """The cells that have been started, in that order; empties the list."""
    file = folder / "starts.txt"
    names = [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return names


def test_every_cell_runs_once_and_a_second_call_runs_none(folder, study, launcher, capsys):
    out = folder / "out"
    assert run_study(study, out, launcher) == (False, [])
    assert starts(folder) == ["tepo-seed_1", "grpo-dapo-seed_1", "tepo-seed_2", "grpo-dapo-seed_2"]
    printed = capsys.readouterr().out
    for number, name in enumerate(
        ["TEPO, seed 1", "GRPO/DAPO, seed 1", "TEPO, seed 2", "GRPO/DAPO, seed 2"], 1
    ):
        assert re.search(rf"^cell {number}/4  {name}  reward 0.750  \d+ s", printed, re.MULTILINE)
    report = (out / "report.md").read_bytes()
    assert run_study(study, out, launcher) == (False, [])
    assert starts(folder) == []
    assert (out / "report.md").read_bytes() == report


def test_only_some_experiments(folder, study, launcher):
    run_study(study, folder / "out", launcher, only=["GRPO/DAPO"])
    assert starts(folder) == ["grpo-dapo-seed_1", "grpo-dapo-seed_2"]
    assert "| cells finished | 2 of 4 |" in (folder / "out/report.md").read_text()
    with pytest.raises(UserError, match="^--only GRPO: no experiment of .* has this label; did you mean"):
        run_study(study, folder / "out", launcher, only=["GRPO"])


def test_a_report_alone_runs_nothing(folder, study, launcher):
    run_study(study, folder / "out", launcher, run=False)
    assert starts(folder) == []
    report = (folder / "out/report.md").read_text()
    assert "| cells finished | 0 of 4 |" in report and "| TEPO | 0 of 2 |" not in report


def test_more_seeds_and_experiments_are_added_to_a_study(folder, study, launcher):
    run_study(study, folder / "out", launcher)
    starts(folder)
    write_study(
        study,
        base=["data.evaluation=[{name: toy, path: toy/test.jsonl}]"],
        seeds=[1, 2, 3],
        experiments=[
            {"label": "TEPO"},
            {"label": "masked KL", "overrides": ["experiment=panel_e_masked_kl"]},
        ],
    )
    run_study(study, folder / "out", launcher)
    assert starts(folder) == ["tepo-seed_3"]  # which is the other experiment's third too
    assert (folder / "out/study.yaml").read_text() == study.read_text()


def test_a_failing_cell_is_told_with_its_log_and_the_others_run(folder, study, launcher, capsys):
    (folder / "fail-tepo-seed_1").touch()
    (folder / "lie-grpo-dapo-seed_2").touch()
    outcome = run_study(study, folder / "out", launcher)
    assert [cell.name for cell in outcome.failed] == ["TEPO, seed 1", "GRPO/DAPO, seed 2"]
    assert sorted(starts(folder)) == ALL
    printed = capsys.readouterr().out
    log = folder / "out/cells/tepo/seed_1.log"
    assert re.search(
        r"cell 1/4  TEPO, seed 1  FAILED after \d+ s: failed with exit code 1: the loss is not finite "
        rf"\(see {log}\)\n", printed,
    )  # fmt: skip
    assert "the loss is not finite" in log.read_text()
    assert "| not finished | TEPO, seed 1, GRPO/DAPO, seed 2 |" in (folder / "out/report.md").read_text()

    (folder / "fail-tepo-seed_1").unlink()
    (folder / "lie-grpo-dapo-seed_2").unlink()
    assert run_study(study, folder / "out", launcher) == (False, [])
    assert starts(folder) == ["tepo-seed_1", "grpo-dapo-seed_2"]


def test_a_finished_cell_of_another_configuration_stops_the_study_before_it_runs(folder, study, launcher):
    run_study(study, folder / "out", launcher, only=["TEPO"])
    starts(folder)
    before = (folder / "out/study.yaml").read_text()
    write_study(study, base=["data.evaluation=[{name: toy, path: toy/train.jsonl}]"])
    with pytest.raises(
        UserError, match="TEPO, seed 1 is finished with data.evaluation.0.path=.*test.jsonl, and "
    ):
        run_study(study, folder / "out", launcher, only=["GRPO/DAPO"])
    assert starts(folder) == []
    assert (folder / "out/study.yaml").read_text() == before


def test_mistakes_leave_nothing_behind(folder, study, launcher):
    write_study(study, base=["trainer.max_step=2"])
    with pytest.raises(UserError, match="trainer.max_step: unknown key"):
        run_study(study, folder / "out", launcher)
    assert not (folder / "out").exists()


def test_a_folder_of_something_else_is_refused(folder, study, launcher):
    (folder / "out").mkdir()
    (folder / "out/mine.txt").write_text("mine")
    with pytest.raises(UserError, match="out: the folder is not empty"):
        run_study(study, folder / "out", launcher)
    assert [path.name for path in (folder / "out").iterdir()] == ["mine.txt"]


@pytest.fixture
def command(folder, study, launcher):
    """Starts the study, two cells at once, in a process of its own that prints its outcome."""
    write_study(study, jobs=2, base=["data.evaluation=[]"])
    script = folder / "study.py"
    script.write_text(
        "from pathlib import Path\n"
        "from tepo_nemo.errors import UserError\n"
        "from tepo_nemo.launch.local import describe_failure\n"
        "from tepo_nemo.launch.pool import run_jobs\n"
        "from tepo_nemo.study.command import run_study\n"
        "from tepo_nemo.study.run import Launcher\n"
        f"launcher = Launcher(lambda config: None, {launcher.train!r}, run_jobs, describe_failure)\n"
        "try:\n"
        "    outcome = run_study(Path('s.yaml'), Path('out'), launcher)\n"
        "    print('interrupted' if outcome.interrupted else 'complete')\n"
        "except UserError as mistake:\n"
        "    print(mistake)\n"
    )
    processes = []

    def start() -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        options = dict(stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
        processes.append(subprocess.Popen([sys.executable, script], **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_an_interrupted_study_goes_on_where_it_was(folder, command):
    waits = [folder / f"wait-{name}" for name in ("grpo-dapo-seed_1", "tepo-seed_2")]
    for wait in waits:
        wait.touch()
    process = command()
    file = folder / "starts.txt"
    wait_until(lambda: file.exists() and "tepo-seed_2" in file.read_text())  # the first cell has ended
    pids = [int(line.split()[1]) for line in file.read_text().splitlines()]
    process.terminate()
    assert process.communicate(timeout=PATIENCE_S)[0].splitlines()[-1] == "interrupted"
    assert not any(is_alive(pid) for pid in pids)
    assert starts(folder) == ["tepo-seed_1", "grpo-dapo-seed_1", "tepo-seed_2"]
    assert not (folder / "out/report.md").exists()

    for wait in waits:
        wait.unlink()
    assert command().communicate(timeout=PATIENCE_S)[0].splitlines()[-1] == "complete"
    assert sorted(starts(folder)) == ["grpo-dapo-seed_1", "grpo-dapo-seed_2", "tepo-seed_2"]
    assert "| cells finished | 4 of 4 |" in (folder / "out/report.md").read_text()


def test_two_processes_do_not_run_the_same_study(folder, command):
    (folder / "wait-tepo-seed_1").touch()
    first = command()
    wait_until((folder / "starts.txt").exists)
    second = command().communicate(timeout=PATIENCE_S)[0]
    assert second == "--output out: another process runs this study; wait for it\n"
    (folder / "wait-tepo-seed_1").unlink()
    assert first.communicate(timeout=PATIENCE_S)[0].splitlines()[-1] == "complete"
    assert sorted(starts(folder)) == ALL
