"""The local launcher with small programs as ranks: how they are started, watched, ended and reported."""

import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.processes import PATIENCE_S, is_alive, wait_until

from tepo_nemo.errors import UserError
from tepo_nemo.launch.local import CONSOLE_VARIABLE, free_port, run_ranks


def program(code: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(code),
    ]


def is_gone(pid: int) -> bool:
    return not is_alive(pid)


def log(folder: Path, rank: int) -> str:
    return (folder / f"rank_{rank}.log").read_text()


def test_ranks_get_their_variables(tmp_path):
    code = "import json; print(json.dumps(dict(os.environ)))"
    assert run_ranks(program(code), ranks=3, logs=tmp_path) == 0
    environments = [json.loads(log(tmp_path, rank)) for rank in range(3)]
    assert [environment["RANK"] for environment in environments] == ["0", "1", "2"]
    assert [environment["LOCAL_RANK"] for environment in environments] == ["0", "1", "2"]
    for environment in environments:
        assert environment["WORLD_SIZE"] == "3"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
    (port,) = {environment["MASTER_PORT"] for environment in environments}
    assert 1024 <= int(port) < 65536


def test_given_variables_do_not_replace_those_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("SET_BY_USER", "user")
    monkeypatch.delenv("SET_BY_NOBODY", raising=False)
    code = "print(os.environ['SET_BY_USER'], os.environ['SET_BY_NOBODY'])"
    run_ranks(
        program(code),
        ranks=1,
        logs=tmp_path,
        environment={"SET_BY_USER": "launcher", "SET_BY_NOBODY": "launcher"},
    )
    assert log(tmp_path, 0) == "user launcher\n"


def test_variables_of_another_launcher_are_replaced(tmp_path, monkeypatch):
    """Inside an allocation that has set them for itself, the ranks must still find each other."""
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    code = "print(rank, os.environ['WORLD_SIZE'], os.environ['MASTER_ADDR'])"
    run_ranks(program(code), ranks=2, logs=tmp_path)
    assert [log(tmp_path, rank) for rank in (0, 1)] == ["0 2 127.0.0.1\n", "1 2 127.0.0.1\n"]


def test_output_goes_to_logs_and_the_console_of_rank_0_to_the_terminal(tmp_path, capfd):
    code = f"""
        print('out', rank); print('err', rank, file=sys.stderr, flush=True)
        if '{CONSOLE_VARIABLE}' in os.environ:
            os.write(int(os.environ['{CONSOLE_VARIABLE}']), f'console {{rank}}\\n'.encode())
    """
    assert run_ranks(program(code), ranks=2, logs=tmp_path) == 0
    assert capfd.readouterr() == ("console 0\n", "")
    assert [sorted(log(tmp_path, rank).splitlines()) for rank in (0, 1)] == [
        ["err 0", "out 0"],
        ["err 1", "out 1"],
    ]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((3, 3), 3), ((0, 3), 3), ((3, 0), 3), ((1, 0), 1), ((0, 1), 1), ((77, 0), 1)],
)
def test_exit_code_of_the_whole(tmp_path, codes, expected):
    assert run_ranks(program(f"sys.exit({codes}[rank])"), ranks=2, logs=tmp_path) == expected


@pytest.mark.parametrize("failing", [0, 1])
def test_first_failing_rank_ends_the_others_and_is_reported_in_one_line(tmp_path, capfd, failing):
    code = f"""
        if rank == {failing}:
            while not os.path.exists(r'{tmp_path}/waiting'):
                time.sleep(0.01)
            print('some output', flush=True)
            raise ValueError('the loss is not finite')
        signal.signal(signal.SIGTERM, lambda *_: (print('was asked to end', flush=True), sys.exit(1)))
        open(r'{tmp_path}/waiting', 'w').close()
        time.sleep(600)
    """
    started = time.monotonic()
    assert run_ranks(program(code), ranks=2, logs=tmp_path) == 1
    assert time.monotonic() - started < PATIENCE_S
    assert capfd.readouterr() == (
        "",
        f"tepo-nemo: error: rank {failing} failed with exit code 1: ValueError: the loss is not finite "
        f"(see {tmp_path}/rank_{failing}.log)\n",
    )
    assert "was asked to end" in log(tmp_path, 1 - failing)


def test_a_rank_that_does_not_end_when_asked_is_killed(tmp_path, capfd):
    code = f"""
        if rank == 1:
            while not os.path.exists(r'{tmp_path}/deaf'):
                time.sleep(0.01)
            sys.exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(r'{tmp_path}/deaf', 'w').close()
        time.sleep(600)
    """
    assert run_ranks(program(code), ranks=2, logs=tmp_path, grace_s=0.5) == 1
    assert "rank 1 failed with exit code 1: it has written nothing" in capfd.readouterr().err


def test_a_killed_rank_is_reported_by_its_signal(tmp_path, capfd):
    code = """
        print('loading', flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert run_ranks(program(code), ranks=1, logs=tmp_path) == 1
    assert capfd.readouterr().err == (
        f"tepo-nemo: error: rank 0 was killed by SIGKILL: loading (see {tmp_path}/rank_0.log)\n"
    )


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("Traceback\nRuntimeError: broken\nwarning: leaked semaphores", "RuntimeError: broken"),
        ("torch.OutOfMemoryError: no memory\n[rank0]: frame", "torch.OutOfMemoryError: no memory"),
        ("[rank0]: ValueError: bad\n", "[rank0]: ValueError: bad"),
        ("Error processing tensor\nlast words", "last words"),
        ("KeyError: 'first'\nValueError: second", "ValueError: second"),
        ("\n\n", "it has written nothing"),
        ("x" * 100_000 + "\nValueError: at the end", "ValueError: at the end"),
        ("ValueError: caf\\xe9 \\xff", "ValueError: caf\ufffd \ufffd"),
    ],
)
def test_line_that_is_reported(tmp_path, capfd, output, line):
    (tmp_path / "output").write_bytes(
        output.replace("\\xe9", "\udce9").replace("\\xff", "\udcff").encode("utf-8", "surrogateescape")
    )
    code = (
        f"sys.stdout.buffer.write(open(r'{tmp_path}/output', 'rb').read()); sys.stdout.flush(); os._exit(1)"
    )
    run_ranks(program(code), ranks=1, logs=tmp_path)
    assert f"exit code 1: {line} (see" in capfd.readouterr().err


def test_a_users_mistake_is_raised_once_however_many_ranks_find_it(tmp_path, capfd):
    code = """
        print('tepo-nemo: error: data.train=x: has no prompts', file=sys.stderr, flush=True)
        os._exit(2)
    """
    with pytest.raises(UserError) as mistake:
        run_ranks(program(code), ranks=4, logs=tmp_path)
    assert str(mistake.value) == "data.train=x: has no prompts"
    assert capfd.readouterr() == ("", "")


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    code = f"""
        import subprocess
        child = subprocess.Popen(['sleep', '600'])
        open(rf'{tmp_path}/child_{{rank}}', 'w').write(str(child.pid))
        sys.exit(rank)
    """
    assert run_ranks(program(code), ranks=2, logs=tmp_path) == 1
    for rank in (0, 1):
        child = tmp_path / f"child_{rank}"
        if child.exists():  # rank 0 may have been ended before it started one
            wait_until(functools.partial(is_gone, int(child.read_text())))
    assert (tmp_path / "child_1").exists()


def test_free_port_can_be_bound_again():
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


# Signals: the launcher runs in a process of its own.

SAVES = """
    def save(*_):
        with open(rf'{folder}/signals_{{rank}}', 'a') as file:
            file.write('SIGTERM\\n')
        time.sleep(0.5)  # a second signal, if there is one, comes meanwhile
        sys.exit(3)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, lambda *_: sys.exit(9))
    open(rf'{folder}/ready_{{rank}}', 'w').write(str(os.getpid()))
    time.sleep(600)
"""
DEAF = """
    signal.signal(signal.SIGTERM, lambda *_: open(rf'{folder}/asked_{{rank}}', 'w').close())
    open(rf'{folder}/ready_{{rank}}', 'w').write(str(os.getpid()))
    while True:
        time.sleep(1)
"""


@pytest.fixture
def launcher(tmp_path):
    """Starts a launcher of two ranks in a process (and group) of its own, and waits until they run."""
    processes = []

    def start(code: str) -> subprocess.Popen:
        script = tmp_path / "launcher.py"
        script.write_text(
            "import sys\nfrom pathlib import Path\nfrom tepo_nemo.launch.local import run_ranks\n"
            f"sys.exit(run_ranks({program(code.format(folder=tmp_path))!r}, ranks=2, "
            f"logs=Path({str(tmp_path)!r})))\n"
        )
        package = Path(__file__).parents[2]
        processes.append(
            subprocess.Popen(
                [sys.executable, script],
                env=os.environ | {"PYTHONPATH": str(package)},
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        wait_until(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in (0, 1)))
        wait_until(lambda: all((tmp_path / f"ready_{rank}").read_text() for rank in (0, 1)))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


def pids(folder: Path) -> list[int]:
    return [int((folder / f"ready_{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_each_rank_once_as_sigterm_and_saved_means_3(tmp_path, launcher, number):
    process = launcher(SAVES)
    os.killpg(process.pid, number)  # as a terminal does: to all of the group
    assert process.wait(PATIENCE_S) == 3
    assert process.stderr.read() == ""
    assert [(tmp_path / f"signals_{rank}").read_text() for rank in (0, 1)] == ["SIGTERM\n", "SIGTERM\n"]


NOTES = """
    def note(number, frame):
        with open(rf'{folder}/signals_{{rank}}', 'a') as file:
            file.write(signal.Signals(number).name + '\\n')
        if number == signal.SIGTERM:
            time.sleep(0.5)  # a rank that is saving already
            sys.exit(3)
    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGUSR1, note)
    open(rf'{folder}/ready_{{rank}}', 'w').write(str(os.getpid()))
    while True:
        time.sleep(0.1)
"""


def test_sigusr1_reaches_each_rank_as_it_is_and_what_follows_does_not_kill(tmp_path, launcher):
    """A scheduler announces the end with it, and asks again with SIGTERM; the ranks may be saving by then."""
    process = launcher(NOTES)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: all((tmp_path / f"signals_{rank}").exists() for rank in (0, 1)))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 3
    for rank in (0, 1):
        assert (tmp_path / f"signals_{rank}").read_text() == "SIGUSR1\nSIGTERM\n"


def test_logs_of_earlier_processes_stay(tmp_path):
    for _ in range(2):
        run_ranks(program("print('here')"), ranks=1, logs=tmp_path)
    assert log(tmp_path, 0) == "here\nhere\n"


def test_a_second_signal_kills_ranks_that_do_not_end(tmp_path, launcher):
    process = launcher(DEAF)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: all((tmp_path / f"asked_{rank}").exists() for rank in (0, 1)))
    assert process.poll() is None  # a rank may take its time to save
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 1
    assert "was killed by SIGKILL" in process.stderr.read()
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_ranks_that_die_of_the_signal_have_not_saved(tmp_path, launcher):
    process = launcher(
        """
        open(rf'{folder}/ready_{{rank}}', 'w').write(str(os.getpid()))
        time.sleep(600)
        """
    )
    process.terminate()
    assert process.wait(PATIENCE_S) == 1
    assert "was killed by SIGTERM" in process.stderr.read()


@pytest.mark.skipif(sys.platform != "linux", reason="only the Linux kernel ends children with their parent")
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path, launcher):
    process = launcher(DEAF)
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))
