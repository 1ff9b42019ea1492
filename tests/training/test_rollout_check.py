"""Rollouts held against the policy, on a policy that may be told to generate otherwise."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from support.tiny_run import CHECK_LIMITS, Run, make_objective, make_run, world_group
from support.torch_policy import TorchPolicy
from support.worlds import Worlds

from tepo_nemo.rollout.check import Gap
from tepo_nemo.rollout.correction import RolloutCorrection
from tepo_nemo.rollout.protocol import Generation, GenerationRequest, RolloutError
from tepo_nemo.training.rollout_check import RolloutCheck, measure_gap

TRUNCATED = RolloutCorrection("truncated", 2.0, 0.5, 5.0, None)


class Mistaken(TorchPolicy):
    """Generates with other weights, at another temperature, or with the same noise for all samples."""

    stale = False
    sampling_temperature: float | None = None
    same_seeds = False
    lost_rows = 0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._first = deepcopy(self.model)

    def infer(self, request: GenerationRequest) -> Generation:
        if self.sampling_temperature is not None:
            request = replace(request, temperature=self.sampling_temperature)
        if self.same_seeds:
            request = replace(request, sample_indices=[0] * len(request))
        current = self.model
        self.model = self._first if self.stale else current
        generation = super().infer(request)
        self.model = current
        lengths, finished = generation.lengths.clone(), generation.finished.clone()
        lengths[: self.lost_rows], finished[: self.lost_rows] = 0, False
        return replace(generation, lengths=lengths, finished=finished)


def mistaken_run(temperature: float = 1.0, seed: int = 0, correction=None, **changes) -> Run:
    policy = Mistaken(make_objective(), temperature=temperature, seed=seed, correction=correction)
    return make_run(policy, **changes)


def test_an_engine_that_is_the_policy_passes() -> None:
    run = mistaken_run()
    run.trainer.fit()
    assert run.trainer.step == 3
    assert max(row["rollout/logprob_gap_mean"] for row in run.recording.metrics) < 1e-6
    assert max(row["rollout/logprob_error_mean"] for row in run.recording.metrics) < 1 + 1e-6


@pytest.mark.parametrize("updates", [1, 2])
def test_another_temperature_ends_the_first_step_before_its_updates(updates: int) -> None:
    """Also where the first mini-batch is all there is. (Fault 17.)"""
    run = mistaken_run(updates_per_rollout=updates)
    run.policy.sampling_temperature = 0.6
    before = run.policy.weights()
    with pytest.raises(RolloutError, match="step 1: .* another temperature than 1;"):
        run.trainer.fit()
    assert torch.equal(run.policy.weights(), before) and run.recording.metrics == []


def test_stale_weights_end_the_second_step() -> None:
    """However little they have moved. (Fault 39.)"""
    for learning_rate in (0.5, 1e-6):
        run = mistaken_run(learning_rate=learning_rate)
        run.policy.stale = True
        with pytest.raises(RolloutError, match="the refit of its weights has no effect"):
            run.trainer.fit()
        assert run.trainer.step == 1


def test_weights_that_did_not_move_show_nothing() -> None:
    """Updates too small for a float to tell: the probe waits for one that is not."""
    run = mistaken_run(learning_rate=1e-30)
    run.policy.stale = True
    run.trainer.fit()
    assert run.trainer.step == 3


def test_the_probe_asks_twice_and_never_again() -> None:
    run = mistaken_run(max_steps=4)
    asked = []
    infer = run.policy.infer
    run.policy.infer = lambda request: (asked.append(len(request)), infer(request))[1]
    run.trainer.fit()
    assert asked == [8, 16, 8, 16, 16, 16]


def test_samples_with_the_same_noise_end_the_first_step() -> None:
    """Faults: identical samples in a group. Rows of a request then share their sample number."""
    run = mistaken_run(prompts_per_step=16, responses_per_prompt=8)
    run.policy.same_seeds = True
    with pytest.raises(RolloutError, match="its seeds have no effect"):
        run.trainer.fit()


def test_checks_are_made_at_the_first_two_steps_and_then_at_the_interval() -> None:
    check = RolloutCheck(5, CHECK_LIMITS, engine="it", temperature=1.0)
    run = mistaken_run()
    due = []
    for step in range(12):
        if check.due(step):
            due.append(step)
            check.compare(run.policy, step, [], _no_rollouts())
    assert due == [0, 1, 5, 10]
    resumed = RolloutCheck(0, CHECK_LIMITS, engine="it", temperature=1.0)
    assert resumed.due(7)
    for step in (7, 8):
        resumed.compare(run.policy, step, [], _no_rollouts())
    assert not resumed.due(9) and not resumed.due(10)


def _no_rollouts():
    from types import SimpleNamespace

    empty = torch.zeros(0, 1)
    generation = Generation(empty.long(), torch.zeros(0).long(), torch.zeros(0).bool(), empty)
    return SimpleNamespace(groups=torch.zeros(0).long(), generation=generation)


def test_responses_that_are_none_are_neither_graded_nor_trained_on() -> None:
    """What an engine returns for a token that the model does not have. They do not vote in their group."""
    run = mistaken_run(max_steps=1)
    run.policy.lost_rows = 2
    run.trainer.fit()
    row, kept = run.recording.metrics[0], run.recording.kept[0]
    assert row["rollout/invalid_fraction"] == 2 / 16
    assert kept.texts[:2] == ["", ""] and [result.status for result in kept.results[:2]] == ["error"] * 2
    assert run.recording.advantages[0][:2].tolist() == [0, 0]
    assert row["tokens/trained"] == int(kept.rollouts.generation.lengths[kept.valid].sum())


# ----------------------------------------------------------------- numbers


def gap_of(rank: int, world_size: int) -> Gap:
    """Of one checked step, whose rollouts are at another temperature."""
    policy = Mistaken(make_objective(), temperature=1.0, group=world_group())
    policy.sampling_temperature = 0.6
    run = make_run(policy, max_steps=1, check_limits=replace(CHECK_LIMITS, stop_gap=99.0, stop_error=99.0))
    found = []
    compare = run.trainer._rollout_check.compare

    def watch(policy, step, mini_batches, rollouts):
        found.append(
            measure_gap(
                policy,
                [micro for mini in mini_batches for micro in mini.micro_batches if micro.old is not None],
            )
        )
        compare(policy, step, mini_batches, rollouts)
        watch.rollouts = rollouts

    run.trainer._rollout_check.compare = watch
    run.trainer.fit()
    return found[0], watch.rollouts


def test_the_gap_by_hand(worlds: Worlds) -> None:
    """From the probabilities that a forward over each whole response gives; the same on two ranks."""
    gap, rollouts = gap_of(0, 1)
    model, generation = TorchPolicy(make_objective()).model, rollouts.generation
    differences = []  # (|D|, row, column, token, whether early), second mini-batch alone: rows 8 to 15
    for row in range(8, 16):
        length = int(generation.lengths[row])
        prompt = rollouts.prompts[int(rollouts.groups[row])].tokens
        response = generation.tokens[row, :length]
        logits = model(torch.tensor([prompt + response.tolist()]))[0, len(prompt) - 1 : -1, :7]
        own = logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)
        for column, difference in enumerate((own - generation.logprobs[row, :length]).abs().tolist()):
            differences.append((difference, row, column, int(response[column]), 2 * column < length))
    valid = gap.row  # some responses could not be graded, and are not trained on
    assert valid >= 8
    trained = [entry for entry in differences if entry[1] in _graded(rollouts)]
    sizes = torch.tensor([entry[0] for entry in trained], dtype=torch.float64)
    assert gap.mean == pytest.approx(float(sizes.mean()), abs=1e-6)
    assert gap.error == pytest.approx(float(sizes.exp().mean()), abs=1e-6)
    early = torch.tensor([entry[4] for entry in trained])
    assert gap.early == pytest.approx(float(sizes[early].mean()), abs=1e-6)
    assert gap.late == pytest.approx(float(sizes[~early].mean()), abs=1e-6)
    assert (gap.row, gap.column, gap.token) == max(trained)[1:4]
    assert gap.largest == pytest.approx(max(trained)[0], abs=1e-6)
    for spread, _ in worlds(2).run(gap_of):
        assert vars(spread) == pytest.approx(vars(gap), abs=1e-9)


def _graded(rollouts) -> set[int]:
    """The letter reward fails for responses that start with c, token 4."""
    return {row for row in range(len(rollouts)) if int(rollouts.generation.tokens[row, 0]) != 4}


# ----------------------------------------------------------------- correction


def test_a_correction_of_nothing_changes_nothing() -> None:
    plain, corrected = mistaken_run(), mistaken_run(correction=TRUNCATED)
    for run in (plain, corrected):
        run.trainer.fit()
    torch.testing.assert_close(corrected.policy.weights(), plain.policy.weights(), rtol=0, atol=1e-6)
    for row in corrected.recording.metrics:
        assert row["rollout/weight_mean"] == pytest.approx(1, abs=1e-6)
        assert row["rollout/dropped_fraction"] == 0


def test_a_correction_weighs_what_another_temperature_drew() -> None:
    """The mean of min(r, 2) over the trained tokens, and another update."""
    outcomes = {}
    for name, correction in {"plain": None, "truncated": TRUNCATED}.items():
        run = mistaken_run(
            correction=correction,
            max_steps=1,
            check_limits=replace(CHECK_LIMITS, stop_gap=99.0, stop_error=99.0),
        )
        run.policy.sampling_temperature = 0.6
        run.trainer.fit()
        outcomes[name] = run
    row = outcomes["truncated"].recording.metrics[0]
    assert 0.5 < row["rollout/weight_mean"] < 1
    assert "rollout/weight_mean" not in outcomes["plain"].recording.metrics[0]
    assert not torch.equal(outcomes["plain"].policy.weights(), outcomes["truncated"].policy.weights())


def test_responses_that_are_too_far_off_are_dropped() -> None:
    """With a limit below every mean gap nothing is left, and the weights stay."""
    limits = replace(CHECK_LIMITS, stop_gap=99.0, stop_error=99.0)
    drop_all = replace(TRUNCATED, token_weight="none", response_gap_limit=1e-3)
    run = mistaken_run(correction=drop_all, max_steps=1, check_limits=limits)
    run.policy.sampling_temperature = 0.6
    before = run.policy.weights()
    run.trainer.fit()
    assert run.recording.metrics[0]["rollout/dropped_fraction"] == 1
    assert run.recording.metrics[0]["grad_norm"] == 0
    assert torch.equal(run.policy.weights(), before)
