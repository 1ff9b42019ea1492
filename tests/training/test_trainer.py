"""The loop: what is trained on, what is told of it, and when."""

import json
import math

import pytest
import torch
from support.tiny_run import letter_reward, make_objective, make_run
from support.torch_policy import STOP, TorchPolicy, respell, spell

from tepo_nemo.reward.result import RewardResult
from tepo_nemo.runs.metrics import METRICS

TIMES = {"time/rollout_s", "time/old_stats_s", "time/train_s", "time/step_s"}
# Told only where a method has a reference policy, or asks for a pass of its own.
OPTIONAL = {"kl/reference_mean", "time/statistics_s"}


class Watching(TorchPolicy):
    """Remembers each update: the weights before it, its mini-batch and its metrics."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.updates = []
        self.forward_passes = 0

    def get_token_statistics(self, mini_batches):
        self.forward_passes += 1
        return super().get_token_statistics(mini_batches)

    def get_loss_and_metrics(self, batch, forward_only):
        before = self.weights()
        loss, metrics = super().get_loss_and_metrics(batch, forward_only)
        means = {name: float(mean.numerator / mean.denominator) for name, mean in metrics.items()}
        self.updates.append((before, batch, means))
        return loss, metrics


class Poisoned(TorchPolicy):
    """Some updates have a gradient that is not finite."""

    def __init__(self, *args, updates, value, **kwargs):
        super().__init__(*args, **kwargs)
        self.poisoned = dict.fromkeys(updates, value)
        self.weights_after = []

    def finish_training_step(self):
        super().finish_training_step()
        if len(self.learning_rates) in self.poisoned:
            self.model.head.grad[0, 0] = self.poisoned[len(self.learning_rates)]

    def optimizer_step(self, learning_rate):
        result = super().optimizer_step(learning_rate)
        self.weights_after.append(self.weights())
        return result


def without_times(metrics):
    return [{key: value for key, value in row.items() if key not in TIMES} for row in metrics]


# --- metrics -------------------------------------------------------------------------------------


def test_every_metric_of_the_table_is_told():
    run = make_run(TorchPolicy(make_objective()))
    run.trainer.fit()
    assert [row["step"] for row in run.recording.metrics] == [1, 2, 3]
    for row in run.recording.metrics:
        assert row.keys() == METRICS.keys() - OPTIONAL
        assert all(isinstance(value, int | float) for value in row.values())
        assert all(math.isfinite(value) for value in row.values())
        assert row["time/step_s"] >= row["time/rollout_s"] + row["time/old_stats_s"] + row["time/train_s"]
        assert min(row[name] for name in TIMES) > 0


def test_the_first_update_is_on_policy_and_the_second_is_not():  # faults 36, 20, 21, T1
    policy = Watching(make_objective(), temperature=0.7)
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
        broken = [text.startswith("c1") for text in texts]
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
        assert row["tokens/padding_fraction"] == pytest.approx(1 - sum(needed) / (16 * width))
        failed += sum(broken)
    assert failed > 0


@pytest.mark.parametrize("temperature, agrees", [(0.7, True), (1.0, False)])
def test_the_gap_shows_another_temperature_in_training(temperature, agrees):  # faults 17, 39, T8
    policy = TorchPolicy(make_objective(), temperature=0.7)
    run = make_run(policy, max_steps=1)
    policy.temperature = temperature  # the rollout keeps 0.7
    run.trainer.fit()
    gap = run.recording.metrics[0]["rollout/logprob_gap_mean"]
    assert gap < 1e-6 if agrees else gap > 0.05


def test_samples_are_those_of_the_step():
    """The recorder gets what was trained on, and advantages that are 0 in the mean of a group's valid responses."""
    run = make_run(TorchPolicy(make_objective()), dynamic_sampling=True)
    run.trainer.fit()
    for kept, advantages in zip(run.recording.kept, run.recording.advantages, strict=True):
        assert (advantages[~kept.valid] == 0).all()
        for group in range(len(kept.rollouts.prompts)):
            own = advantages[kept.rollouts.groups == group].double()
            assert own.sum().abs() < 1e-5 and own.abs().max() > 0.3


# --- what is trained on --------------------------------------------------------------------------


def test_the_sampled_tokens_are_trained_on_not_those_of_their_text():  # faults 22, 16
    policy = Watching(make_objective())
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
    run = make_run(
        TorchPolicy(make_objective()), prompts=[make_prompt_of_one()], prompts_per_step=2, max_steps=1
    )
    run.trainer.fit()
    (kept,) = run.recording.kept
    answers = [tuple(tokens) for tokens in kept.rollouts.generation.tokens.tolist()]
    assert answers[:4] != answers[4:]


def make_prompt_of_one():
    from support.tiny_run import PROMPTS

    return PROMPTS[0]


# --- steps without an update ---------------------------------------------------------------------


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(value):
    """The 2nd update of 3 x 2; the grad norm of its step is that of the other update."""
    policy = Poisoned(make_objective(), updates=[1], value=value, momentum=0.9)
    run = make_run(policy)
    run.trainer.fit()
    assert [row["update/skipped"] for row in run.recording.metrics] == [1, 0, 0]
    assert torch.equal(policy.weights_after[1], policy.weights_after[0])
    for before, after in [(1, 2), (2, 3), (3, 4), (4, 5)]:
        assert not torch.equal(policy.weights_after[before], policy.weights_after[after])
    assert torch.isfinite(policy.weights()).all()
    clean = make_run(TorchPolicy(make_objective(), momentum=0.9), max_steps=1, updates_per_rollout=1)
    assert math.isfinite(run.recording.metrics[0]["grad_norm"]) and clean is not None


def test_the_grad_norm_is_the_mean_over_the_updates_that_were_made():
    norms = {}
    for poisoned in ([], [1], [0, 1]):
        run = make_run(Poisoned(make_objective(), updates=poisoned, value=float("nan")), max_steps=1)
        run.trainer.fit()
        norms[len(poisoned)] = run.recording.metrics[0]["grad_norm"]
    policy = TorchPolicy(make_objective())
    watched = []
    step = policy.optimizer_step

    def optimizer_step(learning_rate):
        result = step(learning_rate)
        watched.append(result.grad_norm)
        return result

    policy.optimizer_step = optimizer_step
    make_run(policy, max_steps=1).trainer.fit()
    assert norms[0] == pytest.approx(sum(watched) / 2)
    assert norms[1] == pytest.approx(watched[0])
    assert math.isnan(norms[2])


# --- schedule ------------------------------------------------------------------------------------


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
    policy = TorchPolicy(make_objective())
    make_run(policy, max_steps=steps, save_interval=interval).trainer.fit()
    assert [path.name for path in policy.saved] == [f"step_{step}" for step in saved]


def test_a_step_is_recorded_before_it_is_saved():
    """Else a run that dies in between resumes after a step that no file knows."""
    policy = TorchPolicy(make_objective())
    run = make_run(policy, save_interval=1)
    recorded = []
    policy.save = lambda path: recorded.append(len(run.recording.metrics))
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


# --- resume --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
@pytest.mark.parametrize("dynamic_sampling", [False, True])
def test_a_continued_run_is_the_uninterrupted_one(stop, dynamic_sampling):  # faults 27, 28
    """6 prompts, 4 a step: an edge of the epoch lies inside steps 2 and 3 ends at one."""
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
    assert without_times(first.recording.metrics + second.recording.metrics) == without_times(
        whole.recording.metrics
    )
    assert torch.equal(second.policy.weights(), whole.policy.weights())
    texts = [kept.texts for run in (first, second) for kept in run.recording.kept]
    assert texts == [kept.texts for kept in whole.recording.kept]


def test_a_finished_run_has_nothing_to_continue():
    run = make_run(TorchPolicy(make_objective()))
    run.trainer.load_state_dict({"step": 3, "consumed_prompts": 12})
    before = run.policy.weights()
    run.trainer.fit()
    assert run.recording.metrics == [] and run.policy.saved == []
    assert torch.equal(run.policy.weights(), before)
