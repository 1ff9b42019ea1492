"""When what happens: learning rate, checkpoints, evaluations, seconds, and where a continued run goes on."""

import json

import pytest
import torch
from support.tiny_run import make_objective, make_run
from support.torch_policy import TorchPolicy

from tepo_nemo.training.timers import PhaseTimers


@pytest.mark.parametrize(
    "warmup, factors", [(0, [1, 1, 1, 1]), (1, [1 / 2, 1, 1, 1]), (3, [1 / 4, 2 / 4, 3 / 4, 1])]
)
def test_the_learning_rate_rises_linearly_and_stays(warmup, factors):
    policy = TorchPolicy(make_objective())
    run = make_run(policy, max_steps=4, warmup_steps=warmup, learning_rate=0.25)
    run.trainer.fit()
    assert [row["lr"] for row in run.recording.metrics] == pytest.approx(
        [0.25 * factor for factor in factors]
    )
    assert policy.learning_rates == pytest.approx([0.25 * factor for factor in factors for _ in range(2)])


@pytest.mark.parametrize(
    "steps, interval, saved", [(5, 0, [5]), (5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 1, [1, 2, 3]), (3, 7, [3])]
)
def test_checkpoints_are_saved_at_their_steps_and_at_the_end(steps, interval, saved):
    run = make_run(TorchPolicy(make_objective()), max_steps=steps, save_interval=interval)
    run.trainer.fit()
    assert [checkpoint.step for checkpoint in run.saver.saved] == saved


def test_a_step_is_recorded_before_it_is_saved():
    """Else a run that dies in between resumes after a step that no file knows."""
    run = make_run(TorchPolicy(make_objective()), save_interval=1)
    recorded = []
    run.saver.save = lambda *_, **__: recorded.append(len(run.recording.metrics))
    run.trainer.fit()
    assert recorded == [1, 2, 3]


@pytest.mark.parametrize(
    "steps, interval, told", [(5, 2, [2, 4]), (4, 2, [2]), (3, 1, [1, 2]), (3, 0, []), (3, 3, [])]
)
def test_evaluations_are_told_with_their_step_and_not_at_the_last(steps, interval, told):
    """After the last step the run evaluates by itself."""
    policy = TorchPolicy(make_objective())
    run = make_run(
        policy,
        evaluate=lambda: {"eval/sum": float(policy.weights().sum())},
        max_steps=steps,
        eval_interval=interval,
    )
    step, weights = run.recording.step, {}

    def record(number, *rest):
        weights[number] = float(policy.weights().sum())
        step(number, *rest)

    run.recording.step = record
    run.trainer.fit()
    scores = {row["step"]: row["eval/sum"] for row in run.recording.metrics if "eval/sum" in row}
    assert scores == {number: weights[number] for number in told}


# --- resume ----------------------------------------------------------------------------------------


def told(metrics):
    """Every digit of the metrics, seconds apart; as text, in which NaN equals NaN."""
    return [
        repr({key: value for key, value in row.items() if not key.startswith("time/")}) for row in metrics
    ]


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
@pytest.mark.parametrize("dynamic_sampling", [False, True])
def test_a_continued_run_is_the_uninterrupted_one(stop, dynamic_sampling):  # faults 27, 28
    """6 prompts, 4 a step: an edge of an epoch lies inside step 2, and step 3 ends at one."""
    settings = dict(dynamic_sampling=dynamic_sampling, warmup_steps=2)
    whole = make_run(TorchPolicy(make_objective(), momentum=0.9), max_steps=4, **settings)
    whole.trainer.fit()
    first = make_run(TorchPolicy(make_objective(), momentum=0.9), max_steps=stop, **settings)
    first.trainer.fit()
    state = json.loads(json.dumps(first.trainer.state_dict()))
    second = make_run(TorchPolicy(make_objective(), momentum=0.9, seed=99), max_steps=4, **settings)
    second.trainer.load_state_dict(state)
    second.policy.load_state(first.policy.state())
    second.trainer.fit()
    assert told(first.recording.metrics + second.recording.metrics) == told(whole.recording.metrics)
    assert torch.equal(second.policy.weights(), whole.policy.weights())
    texts = [kept.texts for run in (first, second) for kept in run.recording.kept]
    assert texts == [kept.texts for kept in whole.recording.kept]


def test_a_finished_run_has_nothing_to_continue():
    run = make_run(TorchPolicy(make_objective()))
    guard = {"in_a_row": 0, "rewinds": 0, "norms": []}
    run.trainer.load_state_dict({"step": 3, "consumed_prompts": 12, "guard": guard})
    before = run.policy.weights()
    run.trainer.fit()
    assert run.recording.metrics == [] and run.saver.saved == []
    assert torch.equal(run.policy.weights(), before)


# --- seconds -------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when told."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("tepo_nemo.training.timers.time.perf_counter", lambda: self.now)

    def sleep(self, seconds):
        self.now += seconds


def test_phases_add_up_until_they_are_taken(monkeypatch):
    clock = Clock(monkeypatch)
    timers = PhaseTimers(lambda: clock.sleep(0.5))  # queued device work that a phase waits for at both ends
    with timers.phase("a"):
        clock.sleep(1)
    clock.sleep(10)
    with timers.phase("a"):
        clock.sleep(2)
    with timers.phase("b"):
        clock.sleep(4)
    # What was queued before a phase is not its own, what it has queued itself is.
    assert timers.take() == {"time/a_s": 4.0, "time/b_s": 4.5, "time/step_s": 20.0}
    clock.sleep(3)
    assert timers.take() == {"time/step_s": 3.0}


def test_the_seconds_of_a_step_are_its_own(monkeypatch):
    """Evaluating and saving belong to no step. The first two ask a small request more, about the refit."""
    clock = Clock(monkeypatch)
    policy = TorchPolicy(make_objective())
    costs = {"infer": 1, "get_token_statistics": 2, "get_loss_and_metrics": 4}
    for name, seconds in costs.items():
        setattr(policy, name, slowed(getattr(policy, name), clock, seconds))
    policy.state = slowed(policy.state, clock, 1000)  # what a checkpoint takes
    run = make_run(policy, evaluate=slowed(dict, clock, 10_000), eval_interval=1, save_interval=1)
    clock.sleep(100_000)
    run.trainer.fit()
    for row in run.recording.metrics:
        of_step = 12 if row["step"] <= 2 else 11
        expected = {"time/rollout_s": 1, "time/old_stats_s": 2, "time/train_s": 8, "time/step_s": of_step}
        assert {name: value for name, value in row.items() if name.startswith("time/")} == expected


def slowed(function, clock, seconds):
    def slow(*args, **kwargs):
        clock.sleep(seconds)
        return function(*args, **kwargs)

    return slow
