"""What a run leaves behind in its directory."""

import contextlib
import io
import json
import math
import os
import threading

import pytest
from support.tiny_run import make_objective, make_run
from support.torch_policy import Broken, TorchPolicy

from tepo_nemo.reward.result import RewardResult
from tepo_nemo.runs import metrics as metrics_module
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import read_metrics
from tepo_nemo.runs.tensorboard import TensorBoard
from tepo_nemo.training import recorder as recorder_module
from tepo_nemo.training.dumps import read_dump
from tepo_nemo.training.recorder import RecordError, RunRecorder, SilentRecorder

SAMPLES = 5


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run", "seed: 1\n")


def make_recorder(directory, console, trackers=None, **changes):
    trackers = {"tensorboard": lambda: TensorBoard(directory.tensorboard)} if trackers is None else trackers
    settings = dict(max_steps=3, log_samples=SAMPLES, dump_rollouts=0, about={}) | changes
    return RunRecorder(directory, trackers=trackers, console=console, **settings)


def record(directory, **settings):
    """A run of three steps that is recorded on disk and in memory."""
    run = make_run(TorchPolicy(make_objective()), **settings)
    console = io.StringIO()
    recorder = make_recorder(directory, console)
    remember = run.recording.step

    def step(*told):
        recorder.step(*told)
        remember(*told)

    run.recording.step = step
    recorder.evaluation("before", {"test": 0.25})
    run.trainer.fit()
    recorder.close()
    return run.recording, recorder, console.getvalue()


def test_metrics_are_written_as_they_were_told(directory):
    recording, recorder, _ = record(directory)
    rows = read_metrics(directory.metrics)
    assert rows == [pytest.approx(row, nan_ok=True) for row in recording.metrics]
    assert recorder.rewards == [row["reward/mean"] for row in recording.metrics]


def test_samples_are_the_first_responses_that_were_trained_on(directory):
    recording, _, _ = record(directory)
    verdicts = set()
    for step, (kept, advantages) in enumerate(
        zip(recording.kept, recording.advantages, strict=True), start=1
    ):
        rows = [json.loads(line) for line in directory.samples(step).read_text().splitlines()]
        assert len(rows) == SAMPLES
        for number, row in enumerate(rows):
            prompt = kept.rollouts.prompts[number // 4].prompt  # 4 responses a prompt, in order
            generation = kept.rollouts.generation
            assert (row["prompt_id"], row["prompt"], row["gold"]) == (prompt.id, prompt.prompt, prompt.gold)
            assert row["response"] == kept.texts[number]
            failed = row["response"].startswith("c")
            assert row["verdict"] == ("error" if failed else "ok")
            assert row["reward"] == float(not failed and prompt.gold in row["response"])
            assert row["advantage"] == pytest.approx(float(advantages[number]))
            assert row["length"] == int(generation.lengths[number])
            assert row["truncated"] == (not generation.finished[number])
            verdicts.add(row["verdict"])
    assert verdicts == {"ok", "error"}


def test_fewer_responses_than_asked_for(directory):
    recording, _, _ = record(directory, prompts_per_step=1, updates_per_rollout=1)
    assert len(directory.samples(1).read_text().splitlines()) == 4 == len(recording.kept[0].rollouts)


def test_a_skipped_step_has_metrics_and_no_samples(directory):  # faults 29
    record(directory, dynamic_sampling=True, reward=lambda *_: RewardResult(1.0, "ok"))
    rows = read_metrics(directory.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["update/skipped"] for row in rows] == [2, 2, 2]
    assert list(directory.samples_folder.iterdir()) == []


def test_a_verifier_that_never_works_is_told_as_such(directory):
    """No verdict at all: the run goes on, and the mean reward is not a number."""
    _, recorder, _ = record(directory, reward=lambda *_: RewardResult(0.0, "timeout"))
    assert all(math.isnan(row["reward/mean"]) for row in read_metrics(directory.metrics))
    assert [row["verifier/failed_fraction"] for row in read_metrics(directory.metrics)] == [1, 1, 1]
    assert all(math.isnan(reward) for reward in recorder.rewards)


def test_a_person_sees_a_line_a_step_and_the_evaluations(directory):
    _, _, text = record(directory)
    before, *steps = text.splitlines()
    assert before == "before  test 0.250"
    assert [line.split("  ")[0] for line in steps] == ["step 1/3", "step 2/3", "step 3/3"]


def test_tensorboard_events_are_there(directory):
    record(directory)
    assert [path.stat().st_size > 0 for path in directory.tensorboard.iterdir()] == [True, True]


def test_other_ranks_write_nothing(directory):
    before = sorted(directory.path.rglob("*"))
    recorder = SilentRecorder()
    recorder.step(1, {"reward/mean": 1.0}, None, None)
    recorder.evaluation("before", {})
    recorder.close()
    assert sorted(directory.path.rglob("*")) == before and list(recorder.rewards) == []


def full_disk(*told):
    raise OSError(28, "No space left on device")


def test_samples_that_cannot_be_written_are_told(directory, monkeypatch):
    monkeypatch.setattr(recorder_module, "write_samples", full_disk)
    _, _, text = record(directory)
    assert len(read_metrics(directory.metrics)) == 3
    assert text.count("could not be written: No space left on device") == 3


def test_what_else_writing_raises_reaches_the_trainer(directory, monkeypatch):
    def broken(*told):
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(recorder_module, "write_samples", broken)
    with pytest.raises(KeyError, match="a mistake of ours"):
        record(directory)


class FullDisk:
    """Of the metrics file: a number of writes fails half-way, as on a full disk."""

    def __init__(self, monkeypatch, failures):
        self.failures = failures
        monkeypatch.setattr(metrics_module.os, "fsync", self)

    def __call__(self, descriptor):
        if self.failures > 0 and os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            self.failures -= 1
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 5)
            raise OSError(28, "No space left on device")


def test_a_step_that_cannot_be_written_waits_for_the_next(directory, monkeypatch):
    """The first two tries fail: the second step's writes the first, then fails; the third writes the rest."""
    FullDisk(monkeypatch, failures=2)
    recording, _, text = record(directory)
    assert read_metrics(directory.metrics) == [pytest.approx(row, nan_ok=True) for row in recording.metrics]
    assert text.count("cannot be written (No space left on device): the next step tries again") == 2


def test_at_the_end_no_step_may_be_missing(directory, monkeypatch):
    FullDisk(monkeypatch, failures=99)
    with pytest.raises(RecordError, match="lacks step 1, 2, 3: No space left on device"):
        record(directory)
    assert directory.metrics.read_text() == ""


def test_a_reader_that_is_gone_does_not_end_the_run(directory):
    """The terminal was closed."""
    reader, writer = os.pipe()
    os.close(reader)
    console = open(writer, "w", buffering=1)
    recorder = make_recorder(directory, console)
    run = make_run(TorchPolicy(make_objective()))
    run.trainer._recorder = recorder
    run.trainer.fit()
    recorder.close()
    with contextlib.suppress(BrokenPipeError):  # the line that nobody has read
        console.close()
    assert len(read_metrics(directory.metrics)) == 3


def test_a_bad_update_is_told_and_its_rollout_kept(directory):
    console = io.StringIO()
    recorder = make_recorder(directory, console, dump_rollouts=2, about={"vocab_size": 7})
    run = make_run(Broken(make_objective(), what="loss", first=4, last=4))
    run.trainer._recorder = recorder
    run.trainer.fit()
    recorder.close()
    assert "step 2, update 2 is skipped: loss not finite (first on rank 0)" in console.getvalue()
    whole, bad = directory.rollout(2), directory.bad_update(2, 2)
    assert [path.parent for path in sorted(directory.path.rglob("rollout.json"))] == [bad, whole]
    assert read_dump(bad).about == {"vocab_size": 7, "update": 2, "why": "loss not finite (first on rank 0)"}
    assert read_dump(whole).about == {"vocab_size": 7}


def test_a_step_is_written_while_training_goes_on(directory, monkeypatch):
    """The step returns before its samples are written; flushing waits for them."""
    goes_on, written = threading.Event(), []

    def slow(*told):
        assert goes_on.wait(10)
        written.append(told)

    monkeypatch.setattr(recorder_module, "write_samples", slow)
    recorder = make_recorder(directory, io.StringIO())
    run = make_run(TorchPolicy(make_objective()), max_steps=1)
    run.trainer.fit()
    recorder.step(1, run.recording.metrics[0], run.recording.kept[0], run.recording.advantages[0])
    assert not written
    goes_on.set()
    recorder.flush()
    assert len(written) == 1
    recorder.close()


def test_a_run_that_goes_on_drops_what_came_after_its_checkpoint(directory):
    recording, _, _ = record(directory)
    recorder = make_recorder(directory, io.StringIO(), after=1)
    assert recorder.rewards == [recording.metrics[0]["reward/mean"]]
    recorder.close()
    assert [row["step"] for row in read_metrics(directory.metrics)] == [1]
    assert [path.name for path in directory.samples_folder.iterdir()] == ["step_000001.jsonl"]
