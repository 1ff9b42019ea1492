"""Rollouts of a run on the real host, trained on again from its start, at its layout and another."""

from pathlib import Path

import pytest
import torch
from support.faulty_runs import Outcome, faulty_config, rows_of, run_all
from support.gather import whole
from support.toy import VOCABULARY, ToyFolder
from support.worlds import Worlds

from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.nemo.replay import open_replay

pytestmark = pytest.mark.timeout(300)

OVERRIDES = ("trainer.dump_rollouts=1", "algorithm.dynamic_sampling=true")


@pytest.fixture(scope="module")
def runs(worlds: Worlds, toy: ToyFolder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Two steps, both again, the second alone, both at DP2: the folder, and what the ranks have of each."""
    folder = tmp_path_factory.mktemp("replay")

    def config(name: str, *overrides: str, replay: str | None = None, data: int = 1) -> Config:
        made = faulty_config(toy, folder / name, *OVERRIDES, *overrides, data=data)
        path = None if replay is None else folder / "run" / replay  # is not there yet
        return made.model_copy(update={"replay": path})

    jobs = {
        "run": config("run"),
        "again": config("again", replay="rollouts"),
        "second": config("second", "algorithm.kl_coefficient=0.5", replay="rollouts/step_000002"),
    }
    (found,) = worlds(1, stack="nemo").run(run_all, [(None, job) for job in jobs.values()], timeout=200)
    outcomes: dict[str, list[Outcome]] = {name: [each] for name, each in zip(jobs, found, strict=True)}
    job = config("dp2", replay="rollouts", data=2)
    outcomes["dp2"] = [each for (each,) in worlds(2, stack="nemo").run(run_all, [(None, job)], timeout=200)]
    return folder, outcomes


def weights(outcomes: list[Outcome]) -> dict[str, torch.Tensor]:
    return whole([outcome.weights for outcome in outcomes], vocabulary=VOCABULARY, tied=False)


def test_the_same_run_to_the_bit(runs: tuple[Path, dict]) -> None:
    folder, outcomes = runs
    assert rows_of(folder / "again") == rows_of(folder / "run")
    first, again = weights(outcomes["run"]), weights(outcomes["again"])
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    for step in (1, 2):
        name = f"samples/step_{step:06d}.jsonl"
        assert (folder / "again" / name).read_text() == (folder / "run" / name).read_text()
    assert "not the configuration" not in outcomes["again"][0].console


def test_two_copies_of_the_model_make_the_same_of_it(runs: tuple[Path, dict]) -> None:
    folder, outcomes = runs
    for row, other in zip(rows_of(folder / "run"), rows_of(folder / "dp2"), strict=True):
        for told in (row, other):
            told.pop("tokens/padding_fraction")  # is of the layout
        assert other == pytest.approx(row, rel=1e-4, abs=1e-6)
    first, other = weights(outcomes["run"]), weights(outcomes["dp2"])
    for name, value in first.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-4)


def test_one_step_with_another_configuration_is_told_to_be_that(runs: tuple[Path, dict]) -> None:
    folder, outcomes = runs
    (row,) = rows_of(folder / "second")
    assert row["step"] == 2 and row["reward/mean"] == rows_of(folder / "run")[1]["reward/mean"]
    assert "replay: not the configuration that made the rollouts: algorithm.kl_coefficient was" in (
        outcomes["second"][0].console
    )


@pytest.mark.parametrize(
    ("override", "vocab_size", "sequence_length", "text"),
    [
        ("seed=1", VOCABULARY + 1, 256, f"is of a model with {VOCABULARY} tokens, and this one has"),
        ("rollout.responses_per_prompt=8", VOCABULARY, 256, "4 where rollout.responses_per_prompt allows"),
        ("rollout.prompts_per_step=2", VOCABULARY, 256, "has 4 where rollout.prompts_per_step allows 1 to 2"),
        ("rollout.max_response_length=2", VOCABULARY, 256, "where rollout.max_response_length allows 1 to 2"),
        ("seed=1", VOCABULARY, 5, "where model.encoder_seq_length allows 1 to 5"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    runs: tuple[Path, dict], toy: ToyFolder, override: str, vocab_size: int, sequence_length: int, text: str
) -> None:
    folder, _ = runs
    config = faulty_config(toy, folder / "refused", f"replay={folder / 'run' / 'rollouts'}", override)
    with pytest.raises(UserError) as refused:
        open_replay(config, vocab_size=vocab_size, sequence_length=sequence_length)
    assert text in str(refused.value) and str(refused.value).startswith("replay=")
