"""A run that is stopped and goes on is the run that nothing has stopped: to the bit, at every layout."""

from pathlib import Path
from shutil import copytree

import pytest
import torch
from support.gather import whole
from support.layouts import distances
from support.resume_runs import Ended, StopAt, resume_config, run_here, samples, told, written
from support.saving import load
from support.toy import VOCABULARY, ToyFolder
from support.worlds import Worlds

from tepo_nemo.config.schema import Config
from tepo_nemo.rollout.protocol import GenerationRequest
from tepo_nemo.runs.checkpoints import CheckpointFolder
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import read_metrics
from tepo_nemo.runs.summary import read_summary

pytestmark = pytest.mark.timeout(300)

STATIC = "algorithm.dynamic_sampling=false"
DISTRIBUTED = "trainer.optimizer.name=distributed_adam"
PRODUCTION = (DISTRIBUTED, "model.precision=bf16", "model.megatron_amp_O2=true")
QUESTION = GenerationRequest([[5, 14, 6, 16]], [1], [0], 1, 0.0, [4])
# By name: the layout, and what differs from TEPO with dynamic sampling.
RUNS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "tp1": ({}, ()),
    "tp2": ({"tensor": 2}, (STATIC,)),
    "pp2-tied": ({"pipeline": 2}, ("model.share_embeddings_and_output_weights=true",)),
    "dp2": ({"data": 2}, (STATIC,)),
    "dp2-production": ({"data": 2}, PRODUCTION),
    "sgd-async": (
        {},
        (
            STATIC,
            "trainer.optimizer.name=sgd",
            "trainer.optimizer.learning_rate=0.1",
            "trainer.async_save=true",
        ),
    ),
    "reference": ({}, (STATIC, "algorithm=grpo", "algorithm.kl_coefficient=0.05")),
}
# A stop for each process: between two updates, in a rollout, between two updates again, and before the first.
STOPS = (StopAt("update", 2), StopAt("rollout", 2), StopAt("update", 4), StopAt("update", 2), None)


def start(worlds: Worlds, config: Config, stop_at: StopAt | None = None) -> list[Ended]:
    return worlds(config.layout.world, stack="nemo").run(run_here, config, stop_at, timeout=110)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_stopped_again_and_again(
    worlds: Worlds, toy: ToyFolder, tmp_path: Path, name: str
) -> None:
    layout, changes = RUNS[name]
    in_one = start(worlds, resume_config(toy, tmp_path / "in_one", *changes, **layout))
    config = resume_config(toy, tmp_path / "stopped", *changes, **layout)
    for stop_at in STOPS:
        ended = start(worlds, config, stop_at)
        assert [of_rank.stopped for of_rank in ended] == [stop_at is not None] * len(ended)
        status = read_summary(tmp_path / "stopped" / "summary.json")["status"]
        assert status == ("done" if stop_at is None else "stopped")
    positions = CheckpointFolder(RunDirectory(config.output).checkpoints).positions()
    assert any(position.updates for position in positions), "it was to be stopped inside a step"
    assert told(tmp_path / "stopped") == told(tmp_path / "in_one")
    assert samples(tmp_path / "stopped") == samples(tmp_path / "in_one")
    assert written(tmp_path / "stopped") == written(tmp_path / "in_one")
    for stopped, uninterrupted in zip(ended, in_one, strict=True):
        for parameter, shard in uninterrupted.weights.shards.items():
            assert torch.equal(stopped.weights.shards[parameter].value, shard.value), parameter


def test_a_run_that_is_stopped_in_its_evaluations(worlds: Worlds, toy: ToyFolder, tmp_path: Path) -> None:
    """Before the first step, twice after a step, and after the last one."""
    benchmark = f"{{name: e, path: {toy.path / 'resume.jsonl'}, samples: 2, temperature: 1.0}}"
    changes = (STATIC, "data.eval_interval=2", f"data.evaluation=[{benchmark}]")
    in_one = resume_config(toy, tmp_path / "in_one", *changes)  # two evaluations on the way, of three batches
    start(worlds, in_one)
    config = resume_config(toy, tmp_path / "stopped", *changes)
    for count, step in ((2, 0), (4, 1), (2, 1), (5, 3), (6, 5), (3, 5)):
        (ended,) = start(worlds, config, StopAt("evaluation", count))
        assert ended.stopped
        assert read_summary(tmp_path / "stopped" / "summary.json")["steps"] == step
    start(worlds, config)
    assert told(tmp_path / "stopped") == told(tmp_path / "in_one")
    assert written(tmp_path / "stopped") == written(tmp_path / "in_one")
    summary, expected = (read_summary(tmp_path / name / "summary.json") for name in ("stopped", "in_one"))
    assert summary.pop("wall_s") > 0 and expected.pop("wall_s") > 0
    assert summary == expected and summary["eval_before"] and summary["eval_after"]


def test_a_checkpoint_is_a_model_that_others_load(worlds: Worlds, toy: ToyFolder, tmp_path: Path) -> None:
    """The folder as it is, and the `.nemo` of the end. Beside the last, that of the best reward is kept."""
    config = resume_config(toy, tmp_path / "run", STATIC, "trainer.keep_last=1", "trainer.keep_best=1")
    (ended,) = start(worlds, config)
    folder = RunDirectory(config.output).checkpoints
    for path in (folder / "step_000005", folder / "step_000005.nemo", folder / "latest"):
        loading = resume_config(toy, tmp_path / "none", f"model.restore_from_path={path}")
        ((weights, _),) = worlds(1, stack="nemo").run(load, loading, QUESTION, timeout=110)
        for name, shard in ended.weights.shards.items():
            assert torch.equal(weights.shards[name].value, shard.value), name
    rewards = {row["step"]: row["reward/mean"] for row in read_metrics(RunDirectory(config.output).metrics)}
    best = max(rewards, key=lambda step: (rewards[step], step))
    kept = {position.step for position in CheckpointFolder(folder).positions()}
    assert kept == {best, 5}


LAYOUTS = {"tp1": {}, "pp2": {"pipeline": 2}, "dp2": {"data": 2}, "tp2_pp2": {"tensor": 2, "pipeline": 2}}


@pytest.mark.parametrize("optimizer", ["adam", "distributed_adam"])
def test_another_layout_goes_on_but_for_rounding(
    worlds: Worlds, toy: ToyFolder, tmp_path: Path, optimizer: str
) -> None:
    """What the third step does to the weights, after two at TP2, inside the step too.

    Both moments have a large say in it: without them Adam's steps would be several times as long.
    """
    changes = (STATIC, f"trainer.optimizer.name={optimizer}", "trainer.max_steps=3")
    tp2 = resume_config(toy, tmp_path / "tp2", *changes, tensor=2)
    inside = start(worlds, tp2, StopAt("update", 6))
    assert (tmp_path / "tp2/checkpoints/step_000002_update_001").is_dir()

    def together(ended: list[Ended]) -> dict[str, torch.Tensor]:
        return whole([of_rank.weights for of_rank in ended], vocabulary=VOCABULARY, tied=False)

    begun = together(inside)
    for name, layout in LAYOUTS.items():
        output = tmp_path / name
        copytree(tmp_path / "tp2", output)
        ended = start(worlds, resume_config(toy, output, *changes, **layout))
        assert "saved at TP2 x PP1 x DP1" in ended[0].console
        if name == "tp1":
            expected = {key: value - begun[key] for key, value in together(start(worlds, tp2)).items()}
        change = {key: value - begun[key] for key, value in together(ended).items()}
        found = distances(change, expected)
        assert max(found.values()) < 1e-3, (name, found)
