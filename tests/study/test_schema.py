"""What a study file may say, and the one line about what it may not."""

from pathlib import Path

import pytest
import yaml
from support.key_tables import table_rows
from support.study_runs import STUDY, write_study

from tepo_nemo.config.presets import config_folder
from tepo_nemo.errors import UserError
from tepo_nemo.study.measures import MEASURES
from tepo_nemo.study.schema import Study, find_study, load_study


def test_a_study_file_is_read(folder):
    study = load_study(write_study(folder / "s.yaml", base=["trainer.warmup_steps=${seed}"]))
    assert study.labels == ["TEPO", "GRPO/DAPO"]
    assert study.base == ["trainer.warmup_steps=${seed}"]  # for the run to resolve
    assert (study.seeds, study.jobs, study.window) == ([1, 2], 1, 2)
    assert study.experiments[0].seeds is None


CLAIM = {"claim": "c", "measure": "grad_norm", "expect": "lower", "of": "TEPO", "than": "GRPO/DAPO"}
FIGURE = {"name": "f", "title": "F", "labels": ["TEPO"], "metrics": ["grad_norm"]}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"experiment": []}, "experiment: unknown key (did you mean experiments?)"),
        ({"seeds": []}, "seeds=[]: list should have at least 1 item after validation, not 0"),
        ({"seeds": [1.5]}, "seeds.0=1.5: must be a whole number"),
        ({"seeds": [3, 3]}, "seeds: 3 is there twice; remove one"),
        ({"jobs": 0}, "jobs=0: must be at least 1"),
        ({"experiments": [{"overrides": []}]}, "experiments.0.label: is missing"),
        ({"experiments": [{"label": "A", "seed": 1}]}, "experiments.0.seed: unknown key (did you mean "),
        ({"experiments": [{"label": "A"}, {"label": "A"}]}, "experiments.label: A is there twice"),
        ({"experiments": [{"label": "A", "seeds": [4, 4]}]}, "seeds of A: 4 is there twice"),
        ({"tables": [{"title": "T", "rows": [{"labels": ["TEP"]}]}]},
         "tables.rows.labels=TEP: no experiment has this label; did you mean TEPO? choose from TEPO, "),
        ({"figures": [FIGURE | {"labels": ["GRPO"]}]}, "figures.f.labels=GRPO: no experiment has this label"),
        ({"figures": [FIGURE | {"metrics": ["gradnorm"]}]},
         "figures.f.metrics=gradnorm: is no metric; did you mean grad_norm?"),
        ({"figures": [FIGURE | {"name": "../f"}]}, "figures.0.name=../f: string should match pattern"),
        ({"figures": [FIGURE, FIGURE]}, "figures.name: f is there twice"),
        ({"claims": [CLAIM | {"than": "DAPO"}]}, "claims.than=DAPO: no experiment has this label"),
        ({"claims": [CLAIM | {"measure": "grad"}]}, "claims.measure=grad: is no measure; "),
        ({"claims": [CLAIM | {"expect": "less"}]}, "claims.0.expect=less: must be one of lower, higher"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_the_file_and_the_key(folder, changes, line):
    path = write_study(folder / "s.yaml", **changes)
    with pytest.raises(UserError) as mistake:
        load_study(path)
    assert str(mistake.value).startswith(f"{path}: {line}")
    assert "\n" not in str(mistake.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("a: [1", "is no valid YAML"), ("- 1", "is no configuration"), ("", "name: is missing")],
)
def test_what_is_no_study_file(folder, text, reason):
    (folder / "s.yaml").write_text(text)
    with pytest.raises(UserError, match=reason):
        load_study(folder / "s.yaml")


def test_null_compares_with_zero_and_benchmarks_are_measures(folder):
    claim = CLAIM | {"measure": "eval/anything", "than": None}
    assert load_study(write_study(folder / "s.yaml", claims=[claim])).claims[0].than is None


def test_a_shipped_study_goes_by_its_name(folder):
    assert find_study(folder / "toy") == folder / "toy"
    assert find_study(Path("paper_mini")) == config_folder() / "study" / "paper_mini.yaml"
    with pytest.raises(UserError, match="^paper_min: there is no such study file .*paper_mini"):
        find_study(Path("paper_min"))


def test_defaults_are_not_in_the_way(folder):
    """Only what the example says is required."""
    for key in STUDY:
        (folder / "s.yaml").write_text(yaml.safe_dump({k: v for k, v in STUDY.items() if k != key}))
        if key == "window":
            load_study(folder / "s.yaml")
        else:
            with pytest.raises(UserError, match=f"{key}: is missing"):
                load_study(folder / "s.yaml")


def test_readme_has_a_row_for_every_key_and_names_every_measure():
    text = (config_folder() / "study" / "README.md").read_text()
    before, _, keys = text.partition("## Keys of a study file")
    assert [line for line in keys.splitlines() if line.startswith("| `")] == list(table_rows(Study))
    assert all(f"`{name}`" in before for name in MEASURES)
