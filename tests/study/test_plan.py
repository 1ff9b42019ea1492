"""From a study file to its cells: each resolved, checked and run once."""

import json
import shutil

import pytest
from support.study_runs import finish, write_study

from tepo_nemo.config.load import load_config
from tepo_nemo.errors import UserError
from tepo_nemo.study.plan import folder_name, make_plan
from tepo_nemo.study.schema import load_study


def plan_of(folder, check=lambda config: None, **changes):
    return make_plan(load_study(write_study(folder / "s.yaml", **changes)), folder / "out", check)


SHARING = {
    "base": ["experiment=toy_cpu", "trainer.max_steps=3"],
    "experiments": [
        {"label": "TEPO", "seeds": [1, 2, 3]},
        {"label": "GRPO/DAPO", "overrides": ["algorithm=grpo_dapo"]},
        {"label": "token-mean", "overrides": ["experiment=panel_d_token_mean"]},
        {"label": "masked KL", "overrides": ["experiment=panel_e_masked_kl"], "seeds": [3, 4]},
    ],
}


def test_a_cell_is_the_configuration_of_its_words_and_seed(folder):
    plan = plan_of(folder, **SHARING)
    cell = plan.rows["GRPO/DAPO"][1]
    expected = load_config(
        [
            "experiment=toy_cpu",
            "trainer.max_steps=3",
            "algorithm=grpo_dapo",
            "seed=2",
            "output=out/cells/grpo-dapo/seed_2",
        ]
    )
    assert cell.config == expected
    assert (cell.name, cell.run.path) == ("GRPO/DAPO, seed 2", folder / "out/cells/grpo-dapo/seed_2")


def test_equal_configurations_are_one_cell_and_the_first_seed_of_all_comes_first(folder):
    plan = plan_of(folder, **SHARING)
    assert {label: [cell.name for cell in cells] for label, cells in plan.rows.items()} == {
        "TEPO": ["TEPO, seed 1", "TEPO, seed 2", "TEPO, seed 3"],
        "GRPO/DAPO": ["GRPO/DAPO, seed 1", "GRPO/DAPO, seed 2"],
        "token-mean": ["TEPO, seed 1", "TEPO, seed 2"],
        "masked KL": ["TEPO, seed 3", "masked KL, seed 4"],
    }
    first, second = (
        ["TEPO, seed 1", "GRPO/DAPO, seed 1", "TEPO, seed 3"],
        ["TEPO, seed 2", "GRPO/DAPO, seed 2"],
    )
    assert [cell.name for cell in plan.cells()] == [*first, *second, "masked KL, seed 4"]
    assert [cell.name for cell in plan.cells(["token-mean"])] == ["TEPO, seed 1", "TEPO, seed 2"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"base": ["trainer.max_step=1"]},
            "TEPO: trainer.max_step: unknown key (did you mean trainer.max_steps?)",
        ),
        (
            {"experiments": [{"label": "A"}, {"label": "B", "overrides": ["algorithm=tpo"]}]},
            "B: algorithm=tpo: unknown",
        ),
        ({"base": ["data.train=none.jsonl"]}, "TEPO: data.train="),
        ({"base": ["seed=3"]}, "base: seed=3 is set by the seeds of the study (remove it)"),
        (
            {"experiments": [{"label": "A", "overrides": ["output=x"]}]},
            "A: overrides: output=x is set by --output",
        ),
        ({"experiments": [{"label": "a b"}, {"label": "A  B"}]}, "A  B: would share the folder a-b with a b"),
    ],
)
def test_a_mistake_names_the_experiment_before_anything_is_made(folder, changes, line):
    with pytest.raises(UserError) as mistake:
        plan_of(folder, **changes)
    assert str(mistake.value).startswith(line)
    assert not (folder / "out").exists()


def test_every_experiment_is_checked_and_a_mistake_names_it(folder):
    checked = []

    def check(config):
        checked.append(config.algorithm.name)
        if config.algorithm.name == "grpo":
            raise UserError("no reference")

    with pytest.raises(UserError, match=r"^GRPO/DAPO: no reference$"):
        plan_of(folder, check)
    assert checked == ["tepo", "grpo"]


@pytest.mark.parametrize(
    ("label", "name"),
    [("TEPO w/o KL", "tepo-w-o-kl"), ("β = 0.1", "0.1"), ("Dr.GRPO", "dr.grpo"), ("..A/..", "a")],
)
def test_folder_of_a_label(label, name):
    assert folder_name(label) == name


def test_a_run_that_is_done_finishes_its_cell(folder):
    cell = plan_of(folder).cells()[0]
    assert not cell.is_finished()
    finish(cell, [0.5])
    assert cell.is_finished()
    summary = json.loads(cell.run.summary.read_text())
    for status in ("failed", "stopped"):
        cell.run.summary.write_text(json.dumps(summary | {"status": status}))
        assert not cell.is_finished()
    cell.run.summary.unlink()
    assert not cell.is_finished()


def test_a_finished_cell_of_another_configuration_is_refused_by_its_first_key(folder):
    finish(plan_of(folder).cells()[0], [0.5])
    changed = plan_of(folder, base=["trainer.max_steps=5", "rollout.temperature=0.5"])
    with pytest.raises(UserError) as refusal:
        changed.finished()
    assert str(refusal.value) == (
        f"{folder}/out/cells/tepo/seed_1: TEPO, seed 1 is finished with rollout.temperature=1.0, and the "
        "study says 0.5; move that run away, or give another --output"
    )


def test_a_study_that_has_moved_is_still_finished(folder):
    cell = plan_of(folder).cells()[0]
    finish(cell, [0.5])
    (folder / "out").rename(folder / "moved")
    study = load_study(folder / "s.yaml")
    moved = make_plan(study, folder / "moved", lambda config: None)
    assert [each.name for each in moved.finished()] == ["TEPO, seed 1"]


def test_an_unfinished_cell_starts_from_nothing(folder):
    cell = plan_of(folder).cells()[0]
    finish(cell, [0.5])
    cell.prepare()
    assert not cell.run.path.exists()
    assert load_config(config_file=cell.config_file) == cell.config
    shutil.rmtree(folder / "out")
    cell.prepare()  # makes the folders that are missing
    assert cell.config_file.exists()
