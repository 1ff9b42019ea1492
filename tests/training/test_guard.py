"""What the guard takes for a bad update, on one rank or all, and when it ends the run."""

import math

import pytest
import torch
import torch.distributed as dist
from support.tiny_run import make_objective, make_run, world_group
from support.torch_policy import Broken, TorchPolicy

from tepo_nemo.parallel.finite import first_ranks_not_finite
from tepo_nemo.training.guard import BadUpdatesError, UpdateGuard
from tepo_nemo.training.policy import Gradient

NAN = float("nan")


def judge(guard, norm, /, **not_finite):
    return guard.judge(Gradient(norm, not_finite))


def make_guard(max_bad_updates=3, spike_factor=None, spike_window=4):
    return UpdateGuard(max_bad_updates=max_bad_updates, spike_factor=spike_factor, spike_window=spike_window)


# --- what is not finite --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("not_finite", "text"),
    [
        ({"loss": 2, "norm": 0}, "loss not finite (first on rank 2)"),
        ({"ratio": 1, "copies": 0}, "importance ratio not finite (first on rank 1)"),
        ({"norm": 0}, "gradient norm not finite"),
    ],
)
def test_the_line_says_what_and_where(not_finite, text):
    skip = judge(make_guard(), NAN, **not_finite)
    assert (skip.reason, skip.text) == ("not_finite", text)


def test_a_good_update_begins_the_count_anew():
    guard = make_guard()
    for bad in (True, True, False, True, True):
        skip = judge(guard, 1.0, **({"norm": 0} if bad else {}))
        assert (skip is not None) is bad
        guard.check_end(1, 1, skip)
    with pytest.raises(BadUpdatesError, match="3 updates in a row"):
        guard.check_end(1, 1, judge(guard, 1.0, norm=0))


def flags(rank, world_size):
    """Two values, not finite on some ranks; one rank lacks a value."""
    values = {
        "good": torch.tensor(1.0) if rank else None,
        "last": torch.tensor(math.inf if rank == world_size - 1 else 0.5, dtype=torch.float64),
        "all": NAN,
    }
    return first_ranks_not_finite(values, dist.group.WORLD)


def test_the_first_rank_is_found_over_the_world(worlds):
    assert worlds(2).run(flags) == [{"last": 1, "all": 0}] * 2
    assert first_ranks_not_finite({"a": torch.tensor(-math.inf), "b": 0.0}, None) == {"a": 0}


# --- spikes --------------------------------------------------------------------------------------


def test_a_spike_is_above_the_factor_times_the_median_of_the_last_good_updates():
    """Window 4: of 1, 9, 2, 3 the median is 2.5, and 3 x 2.5 = 7.5; the spike itself does not count."""
    guard = make_guard(spike_factor=3.0)
    for norm in (
        100.0,
        1.0,
        9.0,
        2.0,
        3.0,
    ):  # the first is forgotten, and none is judged before there are four
        assert judge(guard, norm) is None
    assert judge(guard, 7.6).text == "gradient norm 7.6, the median of 4 is 2.5"
    assert judge(guard, 7.6).reason == "spike"
    assert judge(guard, 7.4) is None
    assert judge(guard, 15.7) is not None and guard.in_a_row == 1  # of 9, 2, 3, 7.4 it is 5.2
    assert judge(guard, 15.5) is None and guard.in_a_row == 0


def test_the_window_survives_a_checkpoint():
    guard = make_guard(spike_factor=2.0)
    for norm in (1.0, 2.0, 3.0, 4.0):
        judge(guard, norm)
    judge(guard, NAN, norm=0)
    again = make_guard(spike_factor=2.0)
    again.load_state_dict(guard.state_dict())
    assert again.in_a_row == 1 and judge(again, 5.1) is not None and judge(again, 4.9) is None
    narrower = make_guard(spike_factor=2.0, spike_window=2)
    narrower.load_state_dict(guard.state_dict())
    assert judge(narrower, 7.1) is not None and judge(narrower, 6.9) is None  # of 3 and 4


class Spiking(TorchPolicy):
    """The gradient of one update is a hundred times what it is."""

    updates = 0

    def finish_training_step(self):
        super().finish_training_step()
        self.updates += 1
        if self.updates == 7:
            for parameter in self.model.parameters():
                parameter.grad *= 100


def test_a_spike_is_skipped_counted_and_told_and_only_where_asked_for():
    norms = {}
    for factor in (None, 10.0):
        policy = Spiking(make_objective())
        run = make_run(policy, max_steps=4, spike_factor=factor, spike_window=5)
        run.trainer.fit()
        norms[factor] = [row["grad_norm"] for row in run.recording.metrics]
        spikes = [row["update/spikes"] for row in run.recording.metrics]
        assert spikes == [row["update/skipped"] for row in run.recording.metrics]
        assert spikes == ([0, 0, 0, 1] if factor else [0] * 4)
        assert [bad[:2] for bad in run.recording.bad_updates] == ([(4, 1)] if factor else [])
    assert norms[10.0][:3] == norms[None][:3] and norms[10.0][3] < norms[None][3] / 10


def test_a_spike_sends_the_run_back_and_past_its_prompts():
    """In step 4, of the 13th to the 16th prompt: it is taken again from step 3, with the next four."""
    run = make_run(
        Spiking(make_objective(), momentum=0.9),
        max_steps=5,
        spike_factor=10.0,
        spike_window=5,
        spike_rewinds=1,
        save_interval=1,
    )
    run.trainer.fit()
    assert [row["step"] for row in run.recording.metrics] == [1, 2, 3, 4, 5]
    assert [row["consumed_prompts"] for row in run.recording.metrics] == [4, 8, 12, 20, 24]
    assert [row["update/rewinds"] for row in run.recording.metrics] == [0, 0, 0, 1, 1]
    assert run.recording.messages == ["back to step 3, with other prompts (rewind 1 of 1)"]
    assert [saved.step for saved in run.saver.saved] == [1, 2, 3, 3, 4, 5]
    third, again = run.saver.saved[2:4]
    assert again.state == third.state | {
        "consumed_prompts": 16,
        "guard": third.state["guard"] | {"rewinds": 1},
    }
    other = make_run(TorchPolicy(make_objective(), momentum=0.9), max_steps=5)
    other.resume(third._replace(state=third.state | {"consumed_prompts": 16}))
    other.trainer.fit()
    assert torch.equal(run.policy.weights(), other.policy.weights())


def test_rewinds_are_bounded_and_need_a_checkpoint():
    for rewinds, save_interval in ((0, 1), (1, 0)):
        run = make_run(
            Spiking(make_objective()),
            max_steps=4,
            spike_factor=10.0,
            spike_window=5,
            spike_rewinds=rewinds,
            save_interval=save_interval,
        )
        run.trainer.fit()
        assert [row["update/spikes"] for row in run.recording.metrics] == [0, 0, 0, 1]
        assert [row["consumed_prompts"] for row in run.recording.metrics] == [4, 8, 12, 16]


# --- a run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["loss", "ratio", "gradient"])
def test_too_many_in_a_row_end_the_run_without_a_checkpoint(what):
    """Steps of two updates: the third, fourth and fifth are bad."""
    policy = Broken(make_objective(), what=what, first=3, last=5)
    run = make_run(policy, max_steps=5, max_bad_updates=3, save_interval=1)
    with pytest.raises(BadUpdatesError) as ended:
        run.trainer.fit()
    assert "3 updates in a row" in str(ended.value) and "step 3, update 1" in str(ended.value)
    assert "bad_updates/step_000003_update_001" in str(ended.value) and "\n" not in str(ended.value)
    assert [saved.step for saved in run.saver.saved] == [1, 2]
    assert torch.equal(policy.weights(), weights_after(1))
    assert [row["update/skipped"] for row in run.recording.metrics] == [0, 2]


def weights_after(steps):
    policy = TorchPolicy(make_objective())
    make_run(policy, max_steps=steps).trainer.fit()
    return policy.weights()


def test_the_count_in_a_row_survives_a_checkpoint():
    """Stopped after two bad updates, a run of at most three ends at the next one."""
    policy = Broken(make_objective(), what="loss", first=3, last=99)
    run = make_run(policy, max_steps=2, max_bad_updates=3)
    run.trainer.fit()
    again = make_run(Broken(make_objective(), what="loss", first=1, last=99), max_steps=5, max_bad_updates=3)
    again.resume(run.saver.saved[-1])
    with pytest.raises(BadUpdatesError, match="step 3, update 1"):
        again.trainer.fit()


def on_one_rank(rank, world_size, what):
    """Rank 1 alone has it, in the second update."""
    policy = Broken(make_objective(), what=what, first=2, last=2, rank=1, group=world_group())
    run = make_run(policy)
    run.trainer.fit()
    told = [{key: row[key] for key in row if not key.startswith("time/")} for row in run.recording.metrics]
    return policy.weights(), told, run.recording.bad_updates


def all_on_one_rank(rank, world_size):
    return {what: on_one_rank(rank, world_size, what) for what in ("loss", "ratio", "gradient")}


def test_what_one_rank_has_skips_the_update_on_all(worlds):
    ranks = worlds(2).run(all_on_one_rank)
    texts = {
        "loss": "loss not finite (first on rank 1)",
        "ratio": "importance ratio not finite (first on rank 1)",
        "gradient": "gradient norm not finite",
    }
    for what, text in texts.items():
        (weights, told, bad), (others_weights, others_told, others_bad) = ranks[0][what], ranks[1][what]
        assert torch.equal(weights, others_weights) and repr(told) == repr(others_told)
        assert bad == others_bad == [(1, 2, text)]
        assert [row["update/not_finite"] for row in told] == [1, 0, 0]
        assert all(math.isfinite(row[key]) for row in told for key in ("loss", "grad_norm", "ratio/mean"))
        assert weights.isfinite().all()


class BrokenStatistics(TorchPolicy):
    """One forward-only pass gives NaN on rank 1."""

    passes = 0

    def get_token_statistics(self, mini_batches):
        statistics = super().get_token_statistics(mini_batches)
        self.passes += 1
        if self.passes == 3 and self.data_parallel_rank == 1:
            return [
                [each._replace(logprobs=each.logprobs * NAN) for each in of_mini] for of_mini in statistics
            ]
        return statistics


STATISTICS = {
    "tepo": dict(preset="tepo"),
    "erpo": dict(preset="erpo"),
    "clip_cov": dict(preset="clip_cov", covariance_low=0.05, covariance_high=2.0, selected_fraction=0.1),
    "kl_cov": dict(preset="kl_cov", selected_fraction=0.2),
}


def with_broken_statistics(rank, world_size):
    found = {}
    for name, objective in STATISTICS.items():
        policy = BrokenStatistics(make_objective(**objective), group=world_group())
        run = make_run(policy, max_steps=4)
        run.trainer.fit()
        found[name] = policy.weights(), [row["update/not_finite"] for row in run.recording.metrics]
    return found


def test_statistics_that_one_rank_has_wrong_skip_what_rests_on_them(worlds):
    """Old statistics, those that choose tokens, and those that shape advantages: nobody hangs."""
    first, second = worlds(2).run(with_broken_statistics)
    for name in STATISTICS:
        weights, skipped = first[name]
        assert torch.equal(weights, second[name][0]) and skipped == second[name][1]
        assert weights.isfinite().all() and skipped[-1] == 0
        # What chooses tokens by them chooses none, and that is all.
        assert sum(skipped) > 0 or name in ("clip_cov", "kl_cov")
