"""The loop: what is trained on, and what is told of it."""

import math
from dataclasses import replace

import pytest
from support.tiny_run import CHECK_LIMITS, PROMPTS, WatchedPolicy, make_objective, make_run
from support.torch_policy import STOP, TorchPolicy, respell, spell

from tepo_nemo.reward.result import RewardResult
from tepo_nemo.runs.metrics import METRICS

TIMES = {"time/rollout_s", "time/old_stats_s", "time/train_s", "time/step_s"}


def test_every_metric_of_the_table_is_told():
    run = make_run(TorchPolicy(make_objective()))
    run.trainer.fit()
    assert [row["step"] for row in run.recording.metrics] == [1, 2, 3]
    for row in run.recording.metrics:
        with_a_reference_policy = {"kl/reference_mean", "time/reference_s"}
        with_a_correction = {"rollout/weight_mean", "rollout/dropped_fraction"}
        assert row.keys() == METRICS.keys() - with_a_reference_policy - with_a_correction
        assert all(isinstance(value, int | float) for value in row.values())
        assert all(math.isfinite(value) for value in row.values())
        assert row["time/step_s"] >= row["time/rollout_s"] + row["time/old_stats_s"] + row["time/train_s"]
        assert min(row[name] for name in TIMES) > 0


def test_the_first_update_is_on_policy_and_the_second_is_not():  # faults 36, 20, 21, T1
    policy = WatchedPolicy(make_objective(), temperature=0.7)
    make_run(policy, max_steps=2).trainer.fit()
    for number, (_, _, means) in enumerate(policy.updates):
        on_policy = {
            "ratio/mean": 1.0,
            "ratio/clip_fraction": 0,
            "kl/mean": 0,
            "mask/fraction": 0,
            "entropy/delta_mean": 0,
        }
        if number % 2 == 0:
            assert {
                name: means[name] for name in on_policy
            } == on_policy  # exactly: same code, shapes and weights
        else:
            assert all(
                means[name] != on_policy[name] for name in ("ratio/mean", "kl/mean", "entropy/delta_mean")
            )
            assert means["mask/fraction"] > 0


def test_counted_metrics_by_hand():  # faults 34
    """Without dynamic sampling, what is kept is what was generated."""
    run = make_run(TorchPolicy(make_objective()), max_steps=4)
    run.trainer.fit()
    failed = 0
    for row, kept in zip(run.recording.metrics, run.recording.kept, strict=True):
        generation, groups = kept.rollouts.generation, kept.rollouts.groups.tolist()
        lengths = generation.lengths.tolist()
        texts = [
            spell(tokens[:length] if tokens[length - 1] != STOP else tokens[: length - 1])
            for tokens, length in zip(generation.tokens.tolist(), lengths, strict=True)
        ]
        golds = [kept.rollouts.prompts[group].prompt.gold for group in groups]
        broken = [text.startswith("c") for text in texts]
        verdicts = [gold in text for text, gold in zip(texts, golds, strict=True)]
        graded = [right for right, fails in zip(verdicts, broken, strict=True) if not fails]
        votes = [
            {v for v, g, f in zip(verdicts, groups, broken, strict=True) if g == group and not f}
            for group in range(4)
        ]
        stopped = [
            tokens[length - 1] == STOP
            for tokens, length in zip(generation.tokens.tolist(), lengths, strict=True)
        ]
        assert row["reward/mean"] == pytest.approx(sum(graded) / len(graded))
        assert row["verifier/failed_fraction"] == sum(broken) / 16
        assert row["reward/group_std_zero_fraction"] == sum(len(vote) < 2 for vote in votes) / 4
        assert row["response_length/mean"] == sum(lengths) / 16
        assert row["response_length/truncated_fraction"] == 1 - sum(stopped) / 16
        trained = [0 if fails else length for length, fails in zip(lengths, broken, strict=True)]
        assert row["tokens/trained"] == sum(trained)
        needed = [
            len(kept.rollouts.prompts[group].tokens) + length - 1 if length else 0
            for group, length in zip(groups, trained, strict=True)
        ]
        width = max(
            len(kept.rollouts.prompts[g].tokens) + length - 1
            for g, length in zip(groups, trained, strict=True)
        )
        # By hand in test_rollout_metrics; here, less than with every response as wide as the longest.
        assert 0 <= row["tokens/padding_fraction"] < 1 - sum(needed) / (16 * width)
        failed += sum(broken)
    assert failed > 0


@pytest.mark.parametrize("temperature, agrees", [(0.7, True), (1.0, False)])
def test_the_gap_shows_another_temperature_in_training(temperature, agrees):  # faults 17, 39, T8
    policy = TorchPolicy(make_objective(), temperature=0.7)
    run = make_run(policy, max_steps=1, check_limits=replace(CHECK_LIMITS, stop_gap=1.0))
    policy.temperature = temperature  # the rollout keeps 0.7
    run.trainer.fit()
    gap = run.recording.metrics[0]["rollout/logprob_gap_mean"]
    assert gap < 1e-6 if agrees else gap > 0.05


def test_samples_are_those_of_the_step():
    """The recorder gets what was trained on; advantages are 0 in the mean of a group's valid responses."""
    run = make_run(TorchPolicy(make_objective()), dynamic_sampling=True)
    run.trainer.fit()
    for kept, advantages in zip(run.recording.kept, run.recording.advantages, strict=True):
        assert (advantages[~kept.valid] == 0).all()
        for group in range(len(kept.rollouts.prompts)):
            own = advantages[kept.rollouts.groups == group].double()
            assert own.sum().abs() < 1e-5 and own.abs().max() > 0.3


def test_the_sampled_tokens_are_trained_on_not_those_of_their_text():  # faults 22, 16
    policy = WatchedPolicy(make_objective())
    run = make_run(policy, max_steps=2, reward=lambda *_: RewardResult(1.0, "ok"))
    run.trainer.fit()
    changed = 0
    for step, kept in enumerate(run.recording.kept):
        trained = {}
        for _, mini_batch, _ in policy.updates[2 * step : 2 * step + 2]:
            for micro in mini_batch.micro_batches:
                for row, targets, mask in zip(micro.rows.tolist(), micro.targets, micro.mask, strict=True):
                    trained[row] = targets[mask].tolist()
        generation = kept.rollouts.generation
        for row, (tokens, length) in enumerate(
            zip(generation.tokens.tolist(), generation.lengths.tolist(), strict=True)
        ):
            assert trained[row] == tokens[:length]
            body = tokens[: length - 1] if tokens[length - 1] == STOP else tokens[:length]
            changed += respell(spell(body)) != body
    assert changed > 0  # the trap is there: text would have given other tokens


def test_a_prompt_that_comes_twice_in_a_step_is_answered_anew():
    """One prompt, 2 groups of 4 a step."""
    run = make_run(TorchPolicy(make_objective()), prompts=[PROMPTS[0]], prompts_per_step=2, max_steps=1)
    run.trainer.fit()
    (kept,) = run.recording.kept
    answers = [tuple(tokens) for tokens in kept.rollouts.generation.tokens.tolist()]
    assert answers[:4] != answers[4:]
