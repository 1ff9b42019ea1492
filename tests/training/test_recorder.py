"""What a run leaves behind in its directory."""

import io
import json
import math
import threading

import pytest
from support.tiny_run import make_objective, make_run
from support.torch_policy import TorchPolicy

from tepo_nemo.reward.result import RewardResult
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import read_metrics
from tepo_nemo.training import recorder as recorder_module
from tepo_nemo.training.recorder import RunRecorder, SilentRecorder

SAMPLES = 5


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run", "seed: 1\n")


def record(directory, **settings):
    """A run of three steps that is recorded on disk and in memory."""
    run = make_run(TorchPolicy(make_objective()), **settings)
    console = io.StringIO()
    recorder = RunRecorder(directory, max_steps=3, log_samples=SAMPLES, console=console)
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


def test_what_writing_raises_reaches_the_trainer(directory, monkeypatch):
    """A full disk ends the run at the next step, not silently."""

    def full(*told):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder_module, "write_samples", full)
    with pytest.raises(OSError, match="No space left"):
        record(directory)
    assert len(read_metrics(directory.metrics)) == 1


def test_a_step_is_written_while_training_goes_on(directory, monkeypatch):
    """The step returns before its samples are written; flushing waits for them."""
    goes_on, written = threading.Event(), []

    def slow(*told):
        assert goes_on.wait(10)
        written.append(told)

    monkeypatch.setattr(recorder_module, "write_samples", slow)
    recorder = RunRecorder(directory, max_steps=1, log_samples=SAMPLES, console=io.StringIO())
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
    recorder = RunRecorder(directory, max_steps=3, log_samples=SAMPLES, console=io.StringIO(), after=1)
    assert recorder.rewards == [recording.metrics[0]["reward/mean"]]
    recorder.close()
    assert [row["step"] for row in read_metrics(directory.metrics)] == [1]
    assert [path.name for path in directory.samples_folder.iterdir()] == ["step_000001.jsonl"]
