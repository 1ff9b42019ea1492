"""Commands side by side, with small programs: how many at once, how they end, and what a signal does."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from support.processes import PATIENCE_S, is_alive, wait_until

from tepo_nemo.launch.pool import run_jobs


class Job(NamedTuple):
    command: list[str]
    log: Path


def program(code: str) -> list[str]:
    return [sys.executable, "-c", "import os, signal, sys, time\n" + textwrap.dedent(code)]


def test_all_jobs_run_and_a_failure_ends_no_other(tmp_path):
    codes = [0, 1, 2, 0]
    jobs = [
        Job(program(f"print('job {i}'); sys.exit({code})"), tmp_path / f"{i}.log")
        for i, code in enumerate(codes)
    ]
    ended = {}
    assert run_jobs(
        jobs, at_once=2, ended=lambda job, code: ended.update({job.log: code}), watch=lambda: None
    )
    assert ended == {job.log: code for job, code in zip(jobs, codes, strict=True)}
    assert [job.log.read_text() for job in jobs] == [f"job {i}\n" for i in range(4)]


def test_a_job_is_taken_when_there_is_room(tmp_path):
    """No more than two at once, and each is made only when one of them has ended."""
    taken, ended, most = [], [], []

    def jobs():
        for index in range(5):
            taken.append(index)
            most.append(len(taken) - len(ended))
            yield Job(program("time.sleep(0.1)"), tmp_path / f"{index}.log")

    run_jobs(jobs(), at_once=2, ended=lambda job, code: ended.append(job), watch=lambda: None)
    assert (taken, len(ended)) == ([0, 1, 2, 3, 4], 5)
    assert max(most) == 2


def test_nothing_to_run():
    assert run_jobs([], at_once=2, ended=lambda job, code: None, watch=lambda: None)


def test_jobs_do_not_outlive_an_error_of_the_watcher(tmp_path):
    job = Job(
        program(f"open(r'{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(600)"), tmp_path / "log"
    )

    def watch():
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        run_jobs([job], at_once=1, ended=lambda job, code: None, watch=watch)
    wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


SLEEPS = """
    open(r'{folder}/ready_' + sys.argv[1], 'w').write(str(os.getpid()))
    time.sleep(600)
"""
DEAF = """
    signal.signal(signal.SIGTERM, lambda *_: open(r'{folder}/asked_' + sys.argv[1], 'w').close())
    open(r'{folder}/ready_' + sys.argv[1], 'w').write(str(os.getpid()))
    while True:
        time.sleep(1)
"""


@pytest.fixture
def pool(tmp_path):
    """Starts a process that runs three such jobs, two at once, and waits until two run."""
    processes = []

    def start(code: str, grace_s: float = PATIENCE_S) -> subprocess.Popen:
        command = program(code.format(folder=tmp_path))
        script = tmp_path / "pool.py"
        script.write_text(
            "from pathlib import Path\n"
            "from types import SimpleNamespace as Job\n"
            "from tepo_nemo.launch.pool import run_jobs\n"
            f"folder, command = Path({str(tmp_path)!r}), {command!r}\n"
            "jobs = [Job(command=[*command, str(i)], log=folder / f'log_{i}') for i in range(3)]\n"
            "ended = []\n"
            "told = dict(ended=lambda job, code: ended.append(code), watch=lambda: None)\n"
            f"print(run_jobs(jobs, at_once=2, grace_s={grace_s}, **told), ended)\n"
        )
        processes.append(
            subprocess.Popen(
                [sys.executable, script],
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        wait_until(lambda: len(pids(tmp_path)) == 2)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def pids(folder: Path) -> list[int]:
    return [int(text) for path in folder.glob("ready_*") if (text := path.read_text())]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_jobs_and_starts_no_further_one(tmp_path, pool, number):
    process = pool(SLEEPS)
    process.send_signal(number)
    assert process.communicate(timeout=PATIENCE_S)[0] == "False []\n"
    assert len(pids(tmp_path)) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))


def test_jobs_that_do_not_end_when_asked_are_killed_after_a_while(tmp_path, pool):
    process = pool(DEAF, grace_s=0.5)
    process.terminate()
    assert process.communicate(timeout=PATIENCE_S)[0] == "False []\n"
    assert len(list(tmp_path.glob("asked_*"))) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))


def test_a_second_signal_kills(tmp_path, pool):
    process = pool(DEAF)
    process.terminate()
    wait_until(lambda: len(list(tmp_path.glob("asked_*"))) == 2)
    process.terminate()
    assert process.communicate(timeout=PATIENCE_S)[0] == "False []\n"


@pytest.mark.skipif(sys.platform != "linux", reason="only the Linux kernel ends children with their parent")
def test_no_job_outlives_a_pool_that_is_killed(tmp_path, pool):
    process = pool(DEAF)
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))
