"""Overlong reward shaping in the loop: advantages see it, dynamic sampling and the metrics do not."""

import statistics

import pytest
from support.tiny_run import make_objective, make_run
from support.torch_policy import TorchPolicy

from tepo_nemo.reward.result import RewardResult


def trained(**changes):
    run = make_run(TorchPolicy(make_objective("dapo")), max_steps=3, **changes)
    run.trainer.fit()
    return run.recording


def lost(length):
    """The longest response has 5 tokens; at a fraction of 0.4 its last 2 are the cache."""
    return {4: 0.5, 5: 1.0}.get(length, 0.0)


def test_advantages_see_the_shaped_reward():
    recording, differing = trained(overlong_fraction=0.4), 0
    for kept, advantages in zip(recording.kept, recording.advantages, strict=True):
        lengths, groups = kept.rollouts.generation.lengths.tolist(), kept.rollouts.groups.tolist()
        rewards = [r - lost(n) for r, n in zip(kept.rewards.tolist(), lengths, strict=True)]
        for row, valid in enumerate(kept.valid.tolist()):
            votes = [
                reward
                for reward, group, votes in zip(rewards, groups, kept.valid.tolist(), strict=True)
                if votes and group == groups[row]
            ]
            expected = 0.0
            if valid and len(set(votes)) > 1:
                expected = (rewards[row] - statistics.fmean(votes)) / (statistics.stdev(votes) + 1e-6)
            assert advantages[row] == pytest.approx(expected, rel=1e-5, abs=1e-6)
        differing += any(lost(length) for length in lengths)
    assert differing == 3


def test_the_metrics_tell_the_reward_as_it_was_graded():
    recording = trained(overlong_fraction=0.4)
    for row, kept in zip(recording.metrics, recording.kept, strict=True):
        graded = kept.rewards[kept.valid]
        assert row["reward/mean"] == pytest.approx(float(graded.mean()))
        assert set(graded.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("fraction", [0.0, 0.4])
def test_dynamic_sampling_asks_for_correctness(fraction):
    """All are correct and of different lengths: with or without shaping, no group is kept."""
    recording = trained(
        overlong_fraction=fraction, dynamic_sampling=True, reward=lambda *_: RewardResult(1.0, "ok")
    )
    assert recording.kept == [None] * 3
    assert all(row["reward/group_std_zero_fraction"] == 1 for row in recording.metrics)


def test_without_dynamic_sampling_length_alone_makes_an_advantage():
    for fraction, taught in ((0.0, False), (0.4, True)):
        recording = trained(overlong_fraction=fraction, reward=lambda *_: RewardResult(1.0, "ok"))
        assert any(bool(advantages.any()) for advantages in recording.advantages) is taught
