"""Steps and updates that are skipped: told, counted, and without a trace in the weights."""

import math

import pytest
import torch
from support.tiny_run import letter_reward, make_objective, make_run
from support.torch_policy import TorchPolicy

from tepo_nemo.reward.result import RewardResult
from tepo_nemo.runs.metrics import METRICS


class Poisoned(TorchPolicy):
    """Some updates, counted from 0, have a gradient that is not finite."""

    def __init__(self, *args, updates, value, **kwargs):
        super().__init__(*args, **kwargs)
        self.poisoned = dict.fromkeys(updates, value)
        self.weights_before = []
        self.grad_norms = []

    def finish_training_step(self):
        super().finish_training_step()
        if len(self.grad_norms) in self.poisoned:
            self.model.head.grad[0, 0] = self.poisoned[len(self.grad_norms)]

    def clip_gradient(self, loss, metrics):
        self.weights_before.append(self.weights())
        gradient = super().clip_gradient(loss, metrics)
        self.grad_norms.append(gradient.norm)
        return gradient


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_step_without_spread_is_skipped_and_told(value):  # faults 29
    policy = TorchPolicy(make_objective(), momentum=0.9)
    before = policy.weights()
    run = make_run(policy, dynamic_sampling=True, reward=lambda *_: RewardResult(value, "ok"))
    run.trainer.fit()
    assert torch.equal(policy.weights(), before)
    assert run.recording.kept == run.recording.advantages == [None] * 3
    for row in run.recording.metrics:
        assert row["update/skipped"] == 2 and row["tokens/trained"] == 0
        assert row["reward/mean"] == value and row["reward/group_std_zero_fraction"] == 1
        assert row.keys() <= METRICS.keys()
    assert [row["consumed_prompts"] for row in run.recording.metrics] == [12, 24, 36]


def test_training_goes_on_after_a_skipped_step():
    """Every verdict of the first step is the same, those of the second are not."""
    asked = []

    def reward(*item):
        asked.append(item)
        return letter_reward(*item) if len(asked) > 3 * 16 else RewardResult(1.0, "ok")

    policy = TorchPolicy(make_objective())
    before = policy.weights()
    run = make_run(policy, dynamic_sampling=True, reward=reward, max_steps=2)
    run.trainer.fit()
    first, second = run.recording.metrics
    assert (first["update/skipped"], second["update/skipped"]) == (2, 0)
    assert second["tokens/trained"] > 0 and not torch.equal(policy.weights(), before)
    # Scripts read rows by key: what could not be measured is NaN, not absent. Times are of what was done.
    assert first.keys() | {"time/old_stats_s", "time/train_s"} == second.keys()
    assert math.isnan(first["loss"]) and math.isfinite(second["loss"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(value):
    """The 2nd update of 3 x 2."""
    policy = Poisoned(make_objective(), updates=[1], value=value, momentum=0.9)
    run = make_run(policy)
    run.trainer.fit()
    assert [row["update/skipped"] for row in run.recording.metrics] == [1, 0, 0]
    assert [row["update/not_finite"] for row in run.recording.metrics] == [1, 0, 0]
    assert run.recording.bad_updates == [(1, 2, "gradient norm not finite")]
    weights = [*policy.weights_before, policy.weights()]
    assert torch.equal(weights[1], weights[2])
    for before, after in [(0, 1), (2, 3), (3, 4), (4, 5), (5, 6)]:
        assert not torch.equal(weights[before], weights[after])
    assert torch.isfinite(policy.weights()).all()
    # The skipped update is in no mean.
    assert all(
        math.isfinite(row[key]) for row in run.recording.metrics for key in ("grad_norm", "loss", "kl/mean")
    )


def test_the_grad_norm_is_the_mean_over_the_updates_that_were_made():
    norms = {}
    for poisoned in ([], [1], [0, 1]):
        policy = Poisoned(make_objective(), updates=poisoned, value=float("nan"))
        run = make_run(policy, max_steps=1)
        run.trainer.fit()
        norms[len(poisoned)] = run.recording.metrics[0]["grad_norm"], policy.grad_norms
    told, (first, second) = norms[0]
    assert told == pytest.approx((first + second) / 2)
    assert norms[1][0] == pytest.approx(first)
    assert math.isnan(norms[2][0])
