"""Training with rollouts from a server: it learns what the embedded engine does, whatever the server does."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.converted import Silent
from support.layouts import Given
from support.server_runs import STEPS, Learned, assert_alike, learn, learning_config
from support.servers import RESTART, TESTS, RunningServer, randomized, running
from support.toy import ToyFolder
from support.worlds import Worlds

from tepo_nemo.config.load import dump_config
from tepo_nemo.conversion.convert import convert
from tepo_nemo.launch.outcome import ExitCode

pytestmark = pytest.mark.timeout(300)

PATIENT = ("rollout.server.backoff=0.05", "rollout.server.load_time_limit=60.0")


@pytest.fixture(scope="module")
def folder(given: Callable[[bool], Given], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server is started with: a model of the same shape, and other weights."""
    path = tmp_path_factory.mktemp("served") / "toy"
    convert(given(False).path, path, watcher=Silent())
    return randomized(path)


@pytest.fixture
def server(folder: Path) -> Iterator[RunningServer]:
    with running("vllm", folder) as server:
        yield server


@pytest.fixture
def run(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given], tmp_path: Path
) -> Callable[..., Learned]:
    """`run(name, *overrides)` trains from the saved weights; what the main rank says."""

    def work(name: str, *overrides: str, tensor: int = 1) -> Learned:
        config = learning_config(toy, tmp_path / name, *given(False).overrides, *overrides, tensor=tensor)
        return worlds(tensor, stack="nemo").run(learn, config, timeout=110)[0]

    return work


def at(server: RunningServer) -> tuple[str, ...]:
    return "rollout=server", f"rollout.server.urls=[{server.url}]", *PATIENT


def test_it_learns_what_the_embedded_engine_learns(
    run: Callable[..., Learned], server: RunningServer
) -> None:
    """At TP2. Noise is drawn otherwise: rewards of a step differ by that of their responses."""
    embedded = run("embedded", tensor=2)
    served = run("served", *at(server), tensor=2)
    assert served.error is embedded.error is None
    assert max(served.gaps) < 1e-5
    assert_alike(embedded.rewards, served.rewards)


def test_faults_leave_no_trace_in_what_is_learned(
    run: Callable[..., Learned],
    server: RunningServer,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Garbage, silence, weights that get lost, a server that dies and is started anew: the same rewards."""
    quiet = run("quiet", *at(server))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    command = f"{sys.executable} {RESTART} vllm {tmp_path / 'pid'} {folder}"
    server.plan(no_json=5, other_prompt=5, unknown_id=5, too_long=5, hangs=1, forgets=1, stale=1, dies=1)
    try:
        disturbed = run(
            "disturbed",
            *at(server),
            f"rollout.server.restart_command='{command}'",
            "rollout.server.request_time_limit=4.0",
            "rollout.server.requests_at_once=8",
        )
        assert server.process.poll() is not None, "it was to die"
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)
    assert disturbed.error is None
    assert disturbed.rewards == quiet.rewards


def test_a_server_that_lies_about_its_weights_ends_the_run(
    run: Callable[..., Learned], server: RunningServer
) -> None:
    """It tells the new version and keeps the old weights: the log-probs give it away, before an update."""
    server.plan(lies=STEPS)
    told = run("lied to", *at(server))
    assert told.error is not None and told.error.startswith("RolloutError: ")
    assert told.rewards == []


def test_without_a_server_nothing_starts(run: Callable[..., Learned], server: RunningServer) -> None:
    """A mistake of the configuration, which ends with exit code 2."""
    server.kill()
    told = run("absent", *at(server), "rollout.server.load_time_limit=0.1")
    assert told.error is not None
    assert told.error.startswith(f"UserError: rollout.server.urls={server.url}: no server that takes weights")


def test_a_lost_server_ends_the_run_with_exit_code_1(
    toy: ToyFolder, given: Callable[[bool], Given], server: RunningServer, tmp_path: Path
) -> None:
    """In one line, before anything is trained on."""
    config = learning_config(toy, tmp_path / "run", *given(False).overrides, *at(server))
    (tmp_path / "config.yaml").write_text(dump_config(config))
    server.plan(dies=1)
    ended = subprocess.run(
        [sys.executable, "-m", "tepo_nemo.cli", "train", "--config", str(tmp_path / "config.yaml")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == ExitCode.FAILED
    assert ended.stderr.count("\n") == 1
    assert "RolloutError: no server has the current weights" in ended.stderr
    assert "nobody listens there" in ended.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
