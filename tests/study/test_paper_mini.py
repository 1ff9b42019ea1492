"""The shipped study: it is the paper's, and every experiment in it can run."""

import pytest
from support.study_runs import write_study

from tepo_nemo.config.presets import choices, config_folder
from tepo_nemo.launch.preflight import check_run
from tepo_nemo.study.plan import make_plan
from tepo_nemo.study.schema import Experiment, load_study

STUDY = load_study(config_folder() / "study" / "paper_mini.yaml")
FIVE = {"TEPO", "TEPO w/o KL", "GRPO/DAPO"}


def seeds_of(experiment: Experiment) -> list[int]:
    return experiment.seeds or STUDY.seeds


def test_every_method_and_the_panels_a_and_d_are_in_it():
    methods = {f"algorithm={name}" for name in choices()["algorithm"]}
    panels = {
        f"experiment={name}"
        for name in choices()["experiment"]
        if name.startswith(("panel_a", "panel_d", "panel_e"))
    }
    assert methods | panels <= {word for experiment in STUDY.experiments for word in experiment.overrides}


def test_five_seeds_where_a_claim_needs_them_and_two_elsewhere():
    claimed = {label for claim in STUDY.claims for label in (claim.of, claim.than) if label is not None}
    counts = {experiment.label: len(seeds_of(experiment)) for experiment in STUDY.experiments}
    assert all(counts[label] == 5 for label in FIVE | claimed)
    assert min(counts.values()) == 2


def test_every_experiment_is_in_a_table():
    assert {label for table in STUDY.tables for rows in table.rows for label in rows.labels} == set(
        STUDY.labels
    )


@pytest.mark.parametrize("experiment", STUDY.experiments, ids=STUDY.labels)
def test_an_experiment_can_run(folder, experiment):
    only = write_study(folder / "s.yaml", base=STUDY.base, experiments=[experiment.model_dump()])
    assert len(make_plan(load_study(only), folder / "out", check_run).cells()) == len(seeds_of(experiment))
