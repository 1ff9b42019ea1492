"""What is not finite on one rank of a real layout: nobody hangs, nobody moves, and the run recovers."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.faulty_runs import TIMEOUT_MINUTES, Outcome, faulty_config, rows_of, run_all
from support.gather import whole
from support.layouts import LAYOUTS, Given
from support.once import once
from support.toy import VOCABULARY, ToyFolder
from support.worlds import Worlds

from tepo_nemo.runs.checkpoints import read_manifest
from tepo_nemo.runs.directory import RunDirectory

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

# What breaks on rank 1 of two, by layout. It is the pipeline stage that has the loss. A gradient breaks after
# it is reduced, so that the data-parallel rank 0 has a sound one; only tensor-parallel ranks hold copies of a
# weight.
BREAKS = {
    "tp2": ["gradient", "copied gradient", "logits", "loss"],
    "pp2": ["gradient", "logits", "loss"],
    "dp2": ["gradient", "logits", "loss"],
}
ENDS = {"every gradient": ("trainer.max_bad_updates=3",), "weights": ()}
LINES = {"gradient": "gradient norm", "copied gradient": "gradient of a replicated weight"}

Found = Callable[[str], tuple[Path, dict[str | None, list[Outcome]]]]


@pytest.fixture(scope="module")
def found(
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
    tmp_path_factory: pytest.TempPathFactory,
) -> Found:
    """By layout: the folder of its runs, and of each what every rank has. DP2 starts from a checkpoint."""

    def work(layout: str) -> tuple[Path, dict[str | None, list[Outcome]]]:
        folder, place = tmp_path_factory.mktemp(layout), LAYOUTS[layout]
        split = dict(tensor=place.tensor, pipeline=place.pipeline, data=place.data)
        own = (*given(False).overrides, "trainer.optimizer.name=distributed_adam") if layout == "dp2" else ()
        jobs = [
            (fault, faulty_config(toy, folder / str(fault), *own, *ENDS.get(fault, ()), **split))
            for fault in (None, *BREAKS[layout], *ENDS)
        ]
        of_ranks = worlds(2, stack="nemo").run(run_all, jobs, timeout=200)
        return folder, {
            fault: list(of_fault)
            for (fault, _), of_fault in zip(jobs, zip(*of_ranks, strict=True), strict=True)
        }

    return once(work)


def whole_weights(outcomes: list[Outcome]) -> dict[str, torch.Tensor]:
    return whole([outcome.weights for outcome in outcomes], vocabulary=VOCABULARY, tied=False)


@pytest.mark.parametrize(
    ("layout", "fault"), [(layout, fault) for layout in BREAKS for fault in BREAKS[layout]]
)
def test_the_update_is_skipped_on_all_ranks_and_the_run_recovers(
    found: Found, layout: str, fault: str
) -> None:
    folder, outcomes = found(layout)
    assert [outcome.error for outcome in outcomes[fault]] == [None, None]
    first, second = rows_of(folder / fault)
    assert [row["update/not_finite"] for row in (first, second)] == [1, 0]
    assert [row["update/skipped"] for row in (first, second)] == [1, 0]
    for row in (first, second):  # null stands for what is not finite: no token may be under the KL mask
        assert {key for key in row if row[key] is None} <= {"kl/masked_mean"} and row["tokens/trained"] > 0
    weights, undisturbed = whole_weights(outcomes[fault]), whole_weights(outcomes[None])
    assert all(value.isfinite().all() for value in weights.values())
    assert any(not torch.equal(value, undisturbed[name]) for name, value in weights.items())
    line = LINES.get(fault, "loss")
    assert f"step 1, update 2 is skipped: {line} not finite" in outcomes[fault][0].console
    (dump,) = (folder / fault / "bad_updates").iterdir()
    assert json.loads((dump / "rollout.json").read_text())["about"]["update"] == 2


@pytest.mark.parametrize("layout", BREAKS)
def test_a_reward_that_is_no_number_is_an_error_and_counted(found: Found, layout: str) -> None:
    """The reward of these runs is not a number for responses that begin with 1 or 2."""
    folder, _ = found(layout)
    rows = rows_of(folder / "None")
    responses = 0
    for step, row in enumerate(rows, start=1):
        samples = [
            json.loads(line) for line in RunDirectory(folder / "None").samples(step).read_text().splitlines()
        ]
        failed = [sample["response"].startswith(("1", "2")) for sample in samples]
        assert [sample["verdict"] == "error" for sample in samples] == failed
        assert row["verifier/failed_fraction"] == sum(failed) / len(failed)
        assert row["update/skipped"] == 0 and row["loss"] is not None
        responses += sum(failed)
    assert responses > 0


@pytest.mark.parametrize("layout", BREAKS)
def test_too_many_in_a_row_end_the_run_on_all_ranks(found: Found, layout: str) -> None:
    folder, outcomes = found(layout)
    for outcome in outcomes["every gradient"]:
        assert outcome.error.startswith("BadUpdatesError: 3 updates in a row were skipped")
        assert "step 2, update 1" in outcome.error and "bad_updates/step_000002_update_001" in outcome.error
    run = RunDirectory(folder / "every gradient")
    assert json.loads(run.summary.read_text())["status"] == "failed"
    assert list(run.checkpoints.iterdir()) == []
    assert run.bad_update(2, 1).is_dir()


@pytest.mark.parametrize("layout", BREAKS)
def test_a_rollout_under_broken_weights_ends_the_run_on_all_ranks(found: Found, layout: str) -> None:
    _, outcomes = found(layout)
    line = "FloatingPointError: the model's logits are not finite: its weights are broken"
    assert [outcome.error for outcome in outcomes["weights"]] == [line, line]


@pytest.mark.parametrize("layout", BREAKS)
def test_every_process_group_has_the_timeout_of_the_configuration(found: Found, layout: str) -> None:
    _, outcomes = found(layout)
    for outcome in outcomes[None]:
        assert outcome.timeouts == {timedelta(minutes=TIMEOUT_MINUTES)}


def test_a_spike_sends_the_run_back_to_its_checkpoint(worlds: Worlds, toy: ToyFolder, tmp_path: Path) -> None:
    """In step 3: step 2 is put in place to the bit, and step 3 taken with the prompts after those it had."""
    overrides = (
        "trainer.max_steps=3",
        "trainer.save_interval=1",
        "trainer.keep_last=9",
        "trainer.spike_factor=50",
        "trainer.spike_window=4",
        "trainer.spike_rewinds=1",
    )
    jobs = [
        (fault, faulty_config(toy, tmp_path / str(fault), *overrides, tensor=2)) for fault in (None, "spike")
    ]
    for _, spiking in worlds(2, stack="nemo").run(run_all, jobs, timeout=200):
        assert spiking.error is None
    assert [row["consumed_prompts"] for row in rows_of(tmp_path / "None")] == [4, 8, 12]
    rows = rows_of(tmp_path / "spike")
    assert [row["consumed_prompts"] for row in rows] == [4, 8, 16]
    assert [row["update/rewinds"] for row in rows] == [0, 0, 1]
    assert [row["update/skipped"] for row in rows] == [0, 0, 0]
    sound, again = (
        read_manifest(RunDirectory(tmp_path / name).checkpoints / "step_000002") for name in ("None", "spike")
    )
    tensors = {name: record for name, record in sound.files.items() if name.endswith(".distcp")}
    assert tensors and tensors == {name: again.files[name] for name in tensors}
    assert (tmp_path / "spike" / "bad_updates" / "step_000003_update_001").is_dir()
