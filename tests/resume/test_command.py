"""`tepo-nemo train` itself: stopped, killed, gone on with, and finished."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import is_alive, wait_until
from support.resume_runs import resume_config, run_here, told, written
from support.toy import ToyFolder
from support.worlds import Worlds

from tepo_nemo.config.load import dump_config
from tepo_nemo.runs.summary import read_summary

pytestmark = pytest.mark.timeout(600)  # four processes with the whole stack
TESTS = Path(__file__).parents[1]
STEPS = 30
PATIENCE_S = 240.0


def start(config_file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tepo_nemo.cli", "train", "--config", str(config_file)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_stopped_killed_and_finished(worlds: Worlds, toy: ToyFolder, tmp_path: Path) -> None:
    changes = ("algorithm.dynamic_sampling=false", f"trainer.max_steps={STEPS}", "trainer.keep_last=3")
    in_one = resume_config(toy, tmp_path / "in_one", *changes)
    worlds(1, stack="nemo").run(run_here, in_one, timeout=110)
    output = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(dump_config(resume_config(toy, output, *changes)))

    def steps() -> int:
        metrics = output / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    process = start(tmp_path / "run.yaml")
    wait_until(lambda: steps() >= 2)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (3, "")
    stopped_at = read_summary(output / "summary.json")["steps"]
    assert out.splitlines()[-1] == (
        f"stopped by SIGUSR1 after step {stopped_at}, with the state saved; the same command goes on"
    )
    assert 2 <= steps() == stopped_at < STEPS

    process = start(tmp_path / "run.yaml")
    wait_until(lambda: steps() >= stopped_at + 2)
    rank = int(subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()[0])
    process.kill()
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert out.splitlines()[0].startswith(f"goes on from checkpoints/step_{stopped_at:06d}")
    wait_until(lambda: not is_alive(rank))

    process = start(tmp_path / "run.yaml")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert told(output) == told(tmp_path / "in_one")
    assert written(output) == written(tmp_path / "in_one")
    assert read_summary(output / "summary.json")["status"] == "done"

    process = start(tmp_path / "run.yaml")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert out.startswith(f"{output}: the run is finished, with {STEPS} steps")
