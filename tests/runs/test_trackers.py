"""Trackers that raise, hang or are not installed, and what the online ones are told."""

import sys
import threading
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tepo_nemo.errors import UserError
from tepo_nemo.runs import trackers as trackers_module
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.trackers import Trackers, check_trackers, openers

METRICS = {"step": 1, "loss": 0.5, "kl/mean": float("nan"), "update/skipped": 0}


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run", "seed: 1\n")


class Failing:
    """Fails at a step, or when it is closed."""

    def __init__(self, at):
        self.at = at
        self.seen = []

    def add(self, step, metrics):
        if step == self.at:
            raise ConnectionError("the server\nis gone")
        self.seen.append(step)

    def close(self):
        if self.at == "close":
            raise ConnectionError("the server is gone")


@pytest.mark.parametrize("at", [2, "close"])
def test_what_a_tracker_raises_is_told_once_and_the_others_go_on(at):
    said, good, bad = [], Failing(None), Failing(at)
    trackers = Trackers({"good": lambda: good, "bad": lambda: bad}, said.append)
    for step in (1, 2, 3):
        trackers.add(step, METRICS)
    trackers.close()
    assert good.seen == [1, 2, 3] and bad.seen == ([1] if at == 2 else [1, 2, 3])
    (line,) = said
    assert line.startswith("bad is switched off, and the run goes on: ConnectionError: the server is gone")


def test_a_tracker_that_cannot_be_opened_is_told_once():
    said = []

    def opener():
        raise PermissionError(13, "Permission denied")

    trackers = Trackers({"bad": opener}, said.append)
    for step in (1, 2):
        trackers.add(step, METRICS)
    trackers.close()
    assert len(said) == 1 and "Permission denied" in said[0]


def test_nobody_waits_for_a_tracker_that_hangs(monkeypatch):
    monkeypatch.setattr(trackers_module, "CLOSING_S", 0.2)
    monkeypatch.setattr(trackers_module, "BACKLOG", 3)
    goes_on, said = threading.Event(), []

    class Hanging(Failing):
        def add(self, step, metrics):
            goes_on.wait()

    slow = Trackers({"slow": lambda: Hanging(None)}, said.append)
    slow.add(1, METRICS)
    slow.close()
    behind = Trackers({"behind": lambda: Hanging(None)}, said.append)
    for step in range(9):
        behind.add(step, METRICS)
    behind.close()
    goes_on.set()
    assert [line.partition(":")[2] for line in said] == [
        " it does not finish within 0.2 s", " it is 3 steps behind",
    ]  # fmt: skip


def test_a_package_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(trackers_module, "find_spec", lambda name: None)
    check_trackers(["tensorboard"])
    with pytest.raises(UserError, match=r"trainer.trackers=\['mlflow'\]: mlflow is not installed"):
        check_trackers(["mlflow"])


def test_tensorboard_gets_every_metric(directory):
    trackers = Trackers(openers(["tensorboard"], directory, {}, 0), pytest.fail)
    trackers.add(1, METRICS)
    trackers.close()
    events = EventAccumulator(str(directory.tensorboard)).Reload()
    assert events.Tensors("loss")[0].tensor_proto.float_val[0] == 0.5


def standing_in(name, monkeypatch, **functions):
    """A module with the functions that are used of it, and what they were called with."""
    calls = []

    def record(function, answer):
        def call(*args, **kwargs):
            calls.append((function, args, kwargs))
            return answer

        return call

    module = types.ModuleType(name)
    for function, answer in functions.items():
        setattr(module, function, record(function, answer))
    monkeypatch.setitem(sys.modules, name, module)
    return calls, record


def test_weights_and_biases_goes_on_with_the_same_run(directory, monkeypatch):
    """Of its interface: init(dir, name, id, resume, config), log(metrics, step), finish()."""
    run = types.SimpleNamespace()
    calls, record = standing_in("wandb", monkeypatch, init=run)
    run.log, run.finish = record("log", None), record("finish", None)
    for step in (1, 2):
        trackers = Trackers(openers(["wandb"], directory, {"seed": 1}, step - 1), pytest.fail)
        trackers.add(step, METRICS)
        trackers.close()
    (_, _, first), log, _, (_, _, second), *_ = calls
    assert [call[0] for call in calls] == ["init", "log", "finish"] * 2
    assert first == second and first["resume"] == "allow" and first["config"] == {"seed": 1}
    assert log == ("log", ({"loss": 0.5, "update/skipped": 0},), {"step": 1})


def test_mlflow_goes_on_with_the_same_run(directory, monkeypatch):
    """Of its interface: start_run(run_id | run_name), log_params(<= 100), log_metrics(metrics, step)."""
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
    names = dict(start_run=run, log_params=None, log_metrics=None, end_run=None)
    calls, _ = standing_in("mlflow", monkeypatch, **names)
    config = {f"key{number}": number for number in range(150)}
    for step in (1, 2):
        trackers = Trackers(openers(["mlflow"], directory, config, step - 1), pytest.fail)
        trackers.add(step, METRICS)
        trackers.close()
    once = ["start_run", "log_params", "log_params", "log_metrics", "end_run"]
    assert [call[0] for call in calls] == [*once, "start_run", "log_metrics", "end_run"]
    assert calls[0][2] == {"run_name": "run"} and calls[5][2] == {"run_id": "abc"}
    assert {**calls[1][1][0], **calls[2][1][0]} == {key: str(value) for key, value in config.items()}
    assert calls[3][1:] == (({"loss": 0.5, "update/skipped": 0},), {"step": 1})
