"""How a rank ends, with a stand-in for the training itself; each rank is a process of its own."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.toy_files import make_toy_files

from tepo_nemo.config.load import dump_config, load_config

PACKAGE = Path(__file__).parents[2]
SMALL = ["rollout.prompts_per_step=8", "trainer.micro_batch_size=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_toy_files(tmp_path)
    return tmp_path


def run(entry: str, train: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `entry` where training, or evaluating, is the body `train` and no stand-in for CUDA is loaded."""
    code = f"""
import os, sys, threading, time, types
from pathlib import Path
from tepo_nemo.errors import UserError
import tepo_nemo.cpu
tepo_nemo.cpu.install = lambda: print("stand-ins, GPUs hidden:", repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
def train(config, console, stop=None):
{textwrap.indent(textwrap.dedent(train), "    ")}
for name, function in (("run", "train"), ("evaluate", "evaluate_checkpoint")):
    module = types.ModuleType("tepo_nemo.nemo." + name)
    setattr(module, function, train)
    sys.modules["tepo_nemo.nemo." + name] = module
from tepo_nemo.launch import rank
{entry}
"""
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "RANK", "WORLD_SIZE"))
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | {"PYTHONPATH": str(PACKAGE)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def local_rank(train: str, **environment: str) -> subprocess.CompletedProcess[str]:
    Path("config.yaml").write_text(dump_config(load_config(SMALL)))
    entry = "sys.argv = ['rank', '--config', 'config.yaml']\nrank.main()"
    return run(entry, train, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", **environment)


def example_rank(train: str, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    arguments = [*SMALL, "output=run", *overrides]
    return run(
        f"rank.check_run = lambda _: None\nrank.train_from_overrides({arguments!r})", train, **environment
    )


def test_a_rank_trains_the_saved_configuration_behind_the_stand_ins():
    ended = local_rank("print(config.rollout.prompts_per_step, file=console)")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "stand-ins, GPUs hidden: ''\n8\n"


def test_the_console_is_the_descriptor_of_the_launcher():
    read, write = os.pipe()
    os.set_inheritable(write, True)
    environment = os.environ | {"PYTHONPATH": str(PACKAGE), "TEPO_NEMO_CONSOLE_FD": str(write)}
    code = "from tepo_nemo.launch.rank import _console; print('step 1', file=_console())"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, pass_fds=(write,), capture_output=True, text=True
    )
    os.close(write)
    with os.fdopen(read) as console:
        assert console.read() == "step 1\n"
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_users_mistake_is_one_line_and_2():
    ended = local_rank("raise UserError('data.train=x:\\nhas no prompts')")
    assert ended.returncode == 2
    assert ended.stderr == "tepo-nemo: error: data.train=x: has no prompts\n"


def test_a_failure_is_a_traceback_and_1():
    ended = local_rank("raise ValueError('broken')")
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback")
    assert ended.stderr.endswith("ValueError: broken\n")


def test_a_failure_ends_the_process_whatever_still_runs():
    ended = local_rank("threading.Thread(target=time.sleep, args=(600,)).start()\nraise ValueError('broken')")
    assert ended.returncode == 1


def test_stopped_with_the_state_saved_is_3():
    assert local_rank("sys.exit(3)").returncode == 3


WAITS = """
print("trains", flush=True)
while not stop.value:
    time.sleep(0.01)
from tepo_nemo.runs.stop import Stopped
print(stop.REASONS[stop.value])
raise Stopped(stop.REASONS[stop.value])
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_is_noted_and_a_stopped_rank_ends_with_3(name):
    ended = local_rank(f"import signal; os.kill(os.getpid(), signal.{name})\n{WAITS}")
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout.splitlines()[-2:] == ["trains", name]


def test_the_time_limit_of_the_configuration_stops_a_rank():
    Path("config.yaml").write_text(dump_config(load_config([*SMALL, "trainer.max_time=0:00:01"])))
    entry = "sys.argv = ['rank', '--config', 'config.yaml']\nrank.main()"
    ended = run(entry, WAITS, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    assert ended.returncode == 3
    assert ended.stdout.splitlines()[-1] == "its time limit"


def test_a_gpu_that_is_not_there_is_refused():
    Path("config.yaml").write_text(dump_config(load_config([*SMALL, "hardware.accelerator=gpu"])))
    entry = "sys.argv = ['rank', '--config', 'config.yaml']\nrank.main()"
    ended = run(entry, "print('trains')", RANK="0", LOCAL_RANK="0", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "tepo-nemo: error: hardware.accelerator=gpu: rank 0 finds 0 CUDA devices on its machine, "
        "hardware.devices_per_node=1 (lower that, or set hardware=cpu)"
    )


def test_rank_0_makes_the_run_directory_before_it_trains(folder):
    ended = example_rank(
        "print(sorted(os.listdir(config.output)))\n(config.output / 'metrics.jsonl').write_text('{}')"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "'config.yaml'" in ended.stdout
    assert load_config(config_file=folder / "run/config.yaml") == load_config([*SMALL, "output=run"])


def test_other_ranks_make_no_run_directory(folder):
    ended = example_rank(
        "print(os.path.exists(config.output))",
        "hardware.devices_per_node=2",
        RANK="1",
        WORLD_SIZE="2",
        LOCAL_RANK="1",
    )
    assert ended.returncode == 0
    assert ended.stdout.splitlines()[-1] == "False"


def test_slurm_variables_reach_the_rank():
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}
    train = "print(*(os.environ[key] for key in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')))"
    ended = example_rank(train, "hardware.devices_per_node=2", SLURM_JOB_NODELIST="gpu[1-2]", **slurm)
    assert ended.stdout.splitlines()[-1] == "1 2 1 gpu1"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("raise UserError('a prompt is too long')", False),
        ("(config.output / 'metrics.jsonl').touch()\nraise UserError('a prompt is too long')", False),
        (
            "(config.output / 'metrics.jsonl').write_text('{}')\nraise UserError('the reward gave nonsense')",
            True,
        ),
        ("raise ValueError('broken')", True),
    ],
)
def test_a_mistake_before_the_first_step_leaves_nothing(folder, body, left):
    ended = example_rank(body)
    assert ended.returncode == (1 if "ValueError" in body else 2)
    assert (folder / "run").exists() == left


def test_an_empty_folder_of_the_user_stays_empty(folder):
    (folder / "run").mkdir()
    assert example_rank("raise UserError('a prompt is too long')").returncode == 2
    assert list((folder / "run").iterdir()) == []


def test_a_run_is_not_overwritten(folder):
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("{}")
    ended = example_rank("print('trains')")
    assert ended.returncode == 2
    assert ended.stderr.startswith("tepo-nemo: error: ") and ended.stderr.count("\n") == 1
    assert "trains" not in ended.stdout
    assert (folder / "run" / "metrics.jsonl").read_text() == "{}"


def test_a_run_goes_on_in_its_directory(folder):
    """With another layout, which is saved; the same command again says that there is nothing to do."""
    finish = """
from tepo_nemo.runs.summary import write_summary
print("trains", len(os.listdir(config.output)))
(config.output / "metrics.jsonl").write_text("{}")
write_summary(config.output / "summary.json", steps=config.trainer.max_steps, reward_first=None,
              reward_last=None, eval_before=None, eval_after=None, wall_s=1.0, status=STATUS)
"""
    ended = example_rank(finish.replace("STATUS", "'stopped'"))
    assert ended.returncode == 0 and "trains 6" in ended.stdout
    ended = example_rank(finish.replace("STATUS", "'done'"), "trainer.log_samples=3")
    assert ended.returncode == 0 and "trains 8" in ended.stdout
    assert load_config(config_file=folder / "run/config.yaml").trainer.log_samples == 3
    ended = example_rank(finish)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        f"{folder}/run: the run is finished, with 72 steps (for more, set trainer.max_steps; for another "
        "run, choose another output)\n"
    )
    ended = example_rank(finish, RANK="1", LOCAL_RANK="0", WORLD_SIZE="1")
    assert (ended.returncode, ended.stdout) == (0, "")
    ended = example_rank(finish.replace("STATUS", "'done'"), "trainer.max_steps=100")
    assert "trains 8" in ended.stdout


def test_a_mistake_of_a_run_that_goes_on_takes_nothing_away(folder):
    assert example_rank("pass").returncode == 0
    assert example_rank("raise UserError('a prompt is too long')").returncode == 2
    assert (folder / "run/config.yaml").exists()


def test_another_configuration_is_refused_in_the_directory_of_a_run(folder):
    assert example_rank("pass").returncode == 0
    ended = example_rank("print('trains')", "seed=2")
    assert ended.returncode == 2
    assert ended.stderr == (
        f"tepo-nemo: error: seed=2: the run in {folder}/run has seed=1 and cannot go on with another (set it "
        "to that, or choose another output)\n"
    )
    assert "trains" not in ended.stdout


def test_a_world_of_another_size_is_refused(folder):
    ended = example_rank("print('trains')", RANK="0", WORLD_SIZE="4", LOCAL_RANK="0")
    assert ended.returncode == 2
    assert ended.stderr == (
        "tepo-nemo: error: hardware.nodes=1 x hardware.devices_per_node=1: 1 ranks are configured, 4 were "
        "started "
        "(start 1, or change the keys)\n"
    )
    assert not (folder / "run").exists()


def test_a_bad_override_is_one_line():
    ended = example_rank("print('trains')", "rollout.responses_per_prompt=1")
    assert ended.returncode == 2
    assert ended.stderr == (
        "tepo-nemo: error: rollout.responses_per_prompt=1: must be at least 2, since a group of one has no "
        "baseline "
        "(set rollout.responses_per_prompt=8)\n"
    )


def test_another_rank_leaves_the_report_to_rank_0_but_does_not_stay_silent_for_ever():
    """Whatever started the ranks ends them when rank 0 fails; who lives on has a mistake of its own."""
    entry = (
        "rank._HEAD_START_S = 0.5\nrank.check_run = lambda config: None\n"
        f"rank.train_from_overrides({SMALL!r})"
    )
    ended = run(entry, "raise UserError('no such file here')", RANK="1", WORLD_SIZE="1", LOCAL_RANK="1")
    assert ended.returncode == 2
    assert ended.stderr == "tepo-nemo: error: rank 1: no such file here\n"


def test_a_rank_that_is_asked_to_end_before_its_report_ends_with_the_mistake_at_once():
    """As the first failure has it asked: by SIGTERM, which it has learned to take for a wish to stop."""
    patience = "rank._HEAD_START_S = 60\nrank.check_run = lambda config: None\n"
    entry = f"{patience}rank.train_from_overrides({SMALL!r})"
    body = "import signal; signal.raise_signal(signal.SIGTERM); raise UserError('no such file here')"
    ended = run(entry, body, RANK="1", WORLD_SIZE="1", LOCAL_RANK="1")
    assert (ended.returncode, ended.stderr) == (2, "")


def evaluating_rank(body: str, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
    arguments = ["model.restore_from_path=toy/warm_start.nemo", "output=scores", *overrides]
    return run(f"rank.evaluate_from_overrides({arguments!r})", body, **environment)


def test_rank_0_opens_the_directory_of_an_evaluation(folder):
    ended = evaluating_rank("print(sorted(os.listdir(config.output)), file=console)")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[-1] == "['config.yaml', 'logs', 'subject.json']"
    again = evaluating_rank("print(config.seed)", "seed=2")
    assert again.returncode == 2
    assert again.stderr.startswith(f"tepo-nemo: error: output={folder}/scores: is an evaluation with seed 1")


@pytest.mark.parametrize(("answered", "left"), [(False, False), (True, True)])
def test_a_mistake_before_the_first_answer_leaves_no_evaluation(folder, answered, left):
    body = (
        "(config.output / 'problems.jsonl').touch()\n" * answered + "raise UserError('a prompt is too long')"
    )
    assert evaluating_rank(body).returncode == 2
    assert (folder / "scores").exists() == left


def test_an_evaluation_that_is_stopped_ends_with_3():
    ended = evaluating_rank("import signal; os.kill(os.getpid(), signal.SIGTERM); time.sleep(50)")
    assert (ended.returncode, ended.stderr) == (3, "")


def test_a_rank_of_the_local_launcher_evaluates():
    Path("config.yaml").write_text(dump_config(load_config(SMALL)))
    entry = "sys.argv = ['rank', '--evaluate', '--config', 'config.yaml']\nrank.main()"
    ended = run(entry, "print('evaluates', file=console)", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "evaluates")
