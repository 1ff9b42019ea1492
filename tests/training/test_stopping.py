"""A run may be stopped wherever it looks: what is saved there goes on as if nothing had happened."""

import pytest
import torch
from support.tiny_run import Run, make_objective, make_run, world_group
from support.torch_policy import TorchPolicy
from support.worlds import Worlds

from tepo_nemo.runs.stop import StopFlag, Stopped
from tepo_nemo.training.stopping import StopCheck

# By name: the method, and how it is run. Each needs something else of the rollout or of an update.
METHODS = {
    "tepo": ("tepo", {}, dict(dynamic_sampling=False)),
    "dynamic sampling": ("tepo", {}, dict(dynamic_sampling=True)),
    "reference policy": ("grpo", {"kl_coefficient": 0.05}, dict(dynamic_sampling=False)),
    "shaped advantages": ("erpo", {}, dict(dynamic_sampling=False)),
    "selected tokens": ("kl_cov", {"selected_fraction": 0.3}, dict(dynamic_sampling=False)),
}


def told(run: Run) -> list[str]:
    """Every digit of the metrics, seconds apart; as text, in which NaN equals NaN."""
    return [
        repr({key: value for key, value in row.items() if not key.startswith("time/")})
        for row in run.recording.metrics
    ]


class Looks:
    """Counts, and asks to stop at one look."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.count, self._stop_at = 0, stop_at

    def __call__(self) -> None:
        self.count += 1
        if self.count == self._stop_at:
            raise Stopped("SIGTERM")


def make(name: str, looks: Looks, seed: int = 0) -> Run:
    """Three steps of two updates and an evaluation after each; two rollout chunks."""
    preset, options, settings = METHODS[name]
    policy = TorchPolicy(make_objective(preset, **options), momentum=0.9, seed=seed, group=world_group())

    def evaluate() -> dict[str, float]:
        policy.prepare_for_inference()
        looks()
        policy.finish_inference()
        return {"eval/sum": float(policy.weights().sum())}

    return make_run(policy, evaluate=evaluate, check_stop=looks, eval_interval=1, warmup_steps=2, **settings)


def go_on_everywhere(rank: int, world_size: int, name: str) -> tuple[int, int]:
    """Stop at each look of a run, and go on; how many there are, and how many are inside a step."""
    looks = Looks()
    in_one = make(name, looks)
    in_one.trainer.fit()
    inside = 0
    for stop_at in range(1, looks.count + 1):
        first = make(name, Looks(stop_at))
        with pytest.raises(Stopped):
            first.trainer.fit()
        second = make(name, Looks(), seed=99)
        if METHODS[name][0] in ("grpo", "erpo"):
            second.policy.reference = (
                first.policy.reference
            )  # the weights of the start, which seed 99 changes
        if first.saver.saved:
            second.resume(first.saver.saved[-1])
            inside += first.saver.saved[-1].progress is not None
        else:
            second.policy.load_state(make(name, Looks()).policy.state())
        second.trainer.fit()
        assert told(first) + told(second) == told(in_one), stop_at
        assert torch.equal(second.policy.weights(), in_one.policy.weights()), stop_at
        texts = [kept.texts for run in (first, second) for kept in run.recording.kept]
        assert texts == [kept.texts for kept in in_one.recording.kept]
    return looks.count, inside


@pytest.mark.parametrize("name", METHODS)
def test_every_look_of_a_run(name: str) -> None:
    looks, inside = go_on_everywhere(0, 1, name)
    assert looks >= 3 * (1 + 2) + 2 and inside >= 3 + 2  # before each second update, and in each evaluation


@pytest.mark.parametrize("name", ["tepo", "shaped advantages"])
def test_every_look_of_two_data_parallel_ranks(worlds: Worlds, name: str) -> None:
    assert worlds(2).run(go_on_everywhere, name)[0][1] >= 5


def test_a_stop_after_a_saved_step_saves_nothing_again() -> None:
    looks = Looks()
    make_run(TorchPolicy(make_objective()), check_stop=looks, max_steps=1).trainer.fit()
    run = make_run(TorchPolicy(make_objective()), check_stop=Looks(looks.count + 1), save_interval=1)
    with pytest.raises(Stopped):
        run.trainer.fit()
    assert [saved.state["step"] for saved in run.saver.saved] == [1]


def test_a_stop_before_the_first_update_saves_nothing() -> None:
    run = make_run(TorchPolicy(make_objective()), check_stop=Looks(2))
    with pytest.raises(Stopped):
        run.trainer.fit()
    assert run.saver.saved == []


def test_seconds_of_a_step_add_up_over_processes() -> None:
    first = make("tepo", Looks(3))  # a chunk, an update, and not the second one
    with pytest.raises(Stopped):
        first.trainer.fit()
    (saved,) = first.saver.saved
    seconds = saved.progress.numbers["seconds"]
    assert set(seconds) == {"time/rollout_s", "time/old_stats_s", "time/train_s", "time/step_s"}
    second = make("tepo", Looks())
    second.resume(saved)
    second.trainer.fit()
    row = second.recording.metrics[0]
    assert row["time/rollout_s"] == seconds["time/rollout_s"]  # it was not generated again
    assert row["time/train_s"] > seconds["time/train_s"]
    assert row["time/step_s"] >= row["time/rollout_s"] + row["time/old_stats_s"] + row["time/train_s"]


def one_is_asked(rank: int, world_size: int) -> str:
    flag = StopFlag()
    flag.limit(0.0 if rank == 1 else None)
    try:
        policy = TorchPolicy(make_objective(), group=world_group())
        StopCheck(flag, policy.max_over_ranks, lambda: None)()
    except Stopped as stopped:
        return str(stopped)
    return "went on"


def test_all_ranks_stop_where_one_is_asked(worlds: Worlds) -> None:
    assert worlds(2).run(one_is_asked) == ["its time limit"] * 2
