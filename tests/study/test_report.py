"""The report of runs that were made up: every number in it by hand."""

import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.study_runs import finish, write_study

from tepo_nemo.runs.plots import running_mean
from tepo_nemo.study.plan import make_plan
from tepo_nemo.study.report import write_report
from tepo_nemo.study.results import MEAN_OF_ANSWERS, MEAN_OF_BENCHMARKS
from tepo_nemo.study.schema import load_study

TWO_BENCHMARKS = [
    "data.evaluation=[{name: toy, path: toy/test.jsonl, samples: 3, temperature: 1.0}, "
    "{name: many, path: toy/many.jsonl}]"
]
STUDY = {
    "base": TWO_BENCHMARKS,
    "seeds": [1, 2, 3],
    "experiments": [
        {"label": "TEPO"},
        {"label": "GRPO/DAPO", "overrides": ["algorithm=grpo_dapo"]},
        {"label": "masked KL", "overrides": ["experiment=panel_e_masked_kl"], "seeds": [1]},
        {"label": "GPG", "overrides": ["algorithm=gpg"], "seeds": [1, 2]},
    ],
    "tables": [
        {"title": "Table 1",
         "rows": [{"labels": ["GRPO/DAPO", "TEPO"]}, {"title": "others", "labels": ["GPG"]}]},
        {"title": "Table 3", "rows": [{"title": "Panel E", "labels": ["masked KL"]}]},
    ],
    "figures": [
        {"name": "figure_3", "title": "Figure 3", "labels": ["TEPO", "GPG", "masked KL"],
         "metrics": ["reward/mean", "grad_norm"]}
    ],
    "claims": [
        {"claim": "fewer steps", "measure": "steps_to_threshold", "expect": "lower", "of": "TEPO",
         "than": "GRPO/DAPO"},
        {"claim": "accuracy", "measure": "eval/toy", "expect": "higher", "of": "GRPO/DAPO", "than": "TEPO"},
        {"claim": "collapse", "measure": "reward_gain", "expect": "lower", "of": "TEPO"},
        {"claim": "GPG is worse", "measure": "reward_last", "expect": "lower", "of": "GPG", "than": "TEPO"},
    ],
}  # fmt: skip
REWARDS = {
    "TEPO": [[0.2, 0.4, 0.6, 0.8], [0.2, 0.4, 0.8, 0.8], [0.4, 0.6, 0.8, 1.0]],
    "GRPO/DAPO": [[0.2, 0.2, 0.2, 0.4], [0.2, 0.2, 0.4, 0.6], [0.2, 0.2, 0.2, 0.2]],
}
# 1 problem x 3 samples, and 5 problems: 3 and 5 answers
AFTER = {"TEPO": [(0.6, 0.8), (0.7, 0.8), (0.8, 0.8)], "GRPO/DAPO": [(0.1, 0.4), (0.2, 0.4), (0.3, 0.4)]}


@pytest.fixture
def made(folder):
    """(study, plan, output): TEPO and GRPO/DAPO have run, GPG has with its first seed."""
    problem = '{{"id": "{}", "prompt": "1+1=", "gold": "2"}}\n'
    (folder / "toy/many.jsonl").write_text("".join(problem.format(number) for number in range(5)))
    study = load_study(write_study(folder / "s.yaml", **STUDY))
    plan = make_plan(study, folder / "out", lambda config: None)
    for label, rewards in REWARDS.items():
        for cell, of_cell, (toy, many) in zip(plan.rows[label], rewards, AFTER[label], strict=True):
            norms = [float(cell.seed)] * 4
            finish(cell, of_cell, after={"toy": toy, "many": many}, grad_norm=norms)
    finish(plan.rows["GPG"][0], [0.5, 0.5], after={"toy": 0.5, "many": 0.5})
    return study, plan, folder / "out"


def row(report: str, table: str, label: str) -> list[str]:
    """The cells of a row of the report."""
    lines = report.partition(f"## {table}\n")[2].partition("\n## ")[0].splitlines()
    (found,) = (line for line in lines if line.startswith(f"| {label} |"))
    return found.strip("| ").split(" | ")[1:]


def test_accuracy_is_methods_by_benchmarks(made):
    write_report(*made)
    report = (made[2] / "report.md").read_text()
    table = "Table 1: accuracy after training, %"
    assert f"|  | seeds | toy | many | {MEAN_OF_BENCHMARKS} | {MEAN_OF_ANSWERS} |" in report
    # toy 0.6, 0.7, 0.8; the mean of the columns 0.70, 0.75, 0.80; (3 toy + 5 * 0.8) / 8 is 0.725, 0.7625, 0.8
    assert row(report, table, "TEPO") == [
        "3", "70.0 ± 10.0 (60.0 to 80.0)", "80.0 ± 0.0 (80.0 to 80.0)", "75.0 ± 5.0 (70.0 to 80.0)",
        "76.2 ± 3.8 (72.5 to 80.0)",
    ]  # fmt: skip
    assert row(report, table, "GPG") == ["1 of 2", "50.0", "50.0", "50.0", "50.0"]
    assert row(report, table, "before training")[1] == "25.0 ± 0.0 (25.0 to 25.0)"
    assert "- toy: avg@3 of 1 problems at temperature 1\n- many: avg@1 of 5 problems, greedy\n" in report
    heading = report.index("| **others** |")
    assert report.index("| TEPO | 3 |") < heading < report.index("| GPG | 1 of 2 |")


def test_training_says_what_was_not_reached_and_what_is_missing(made):
    write_report(*made)
    report = (made[2] / "report.md").read_text()
    tepo = row(report, "Table 1: training", "TEPO")
    # last two: 0.7, 0.8, 0.9; minus the first two 0.3, 0.3, 0.5; means of 0.5 at steps 3, 3, 2
    assert tepo[:4] == [
        "3",
        "0.800 ± 0.100 (0.700 to 0.900)",
        "0.433 ± 0.058 (0.400 to 0.500)",
        "2.7 ± 0.6 (2.0 to 3.0)",
    ]
    assert tepo[6] == "2.000 ± 1.000 (1.000 to 3.000)"  # gradient norms 1, 2, 3
    assert row(report, "Table 1: training", "GRPO/DAPO")[3] == "reached by 1 of 3"
    assert row(report, "Table 1: training", "GPG")[6] == "-"
    assert "| cells finished | 7 of 8 |" in report and "| not finished | GPG, seed 2 |" in report
    assert "| computing | 7 minutes of runs |" in report


def test_an_experiment_of_shared_cells_has_their_numbers(made):
    write_report(*made)
    report = (made[2] / "report.md").read_text()
    assert row(report, "Table 3: training", "masked KL")[:2] == ["1", "0.700"]
    assert row(report, "Experiments", "masked KL") == ["experiment=panel_e_masked_kl", "1", "TEPO"]


def test_claims(made):
    write_report(*made)
    report = (made[2] / "report.md").read_text()
    table = "Claims"
    # GRPO/DAPO gets to a mean of 0.5 at step 4 once, and never (5, a bound) twice: 8/3 - 14/3
    steps = row(report, table, "fewer steps")
    assert steps[:2] == ["steps to a reward of 0.5", "TEPO lower than GRPO/DAPO"]
    assert steps[2].startswith("-2 (-") and steps[2].endswith("), with a lower bound")
    assert steps[3:] == ["3 / 3", "appears"]
    accuracy = row(report, table, "accuracy")
    assert accuracy[2].startswith("-0.5 (-0.") and accuracy[4] == "does not appear"
    collapse = row(report, table, "collapse")
    assert collapse[1:] == ["TEPO lower than 0", "+0.4333 (+0.4 to +0.5)", "3", "does not appear"]
    assert row(report, table, "GPG is worse")[2:] == ["-0.3", "1 / 3", "not decided by these seeds"]


def test_json_holds_every_number(made):
    study, plan, output = made
    write_report(study, plan, output)
    data = json.loads((output / "report.json").read_text())
    assert data["cells"] == {"all": 8, "finished": 7, "missing": ["GPG, seed 2"]}
    grpo = data["experiments"]["GRPO/DAPO"]
    assert [cell["measures"]["steps_to_threshold"] for cell in grpo["cells"]] == [5, 4, 5]
    assert [cell["censored"] for cell in grpo["cells"]] == [
        ["steps_to_threshold"],
        [],
        ["steps_to_threshold"],
    ]
    assert grpo["measures"]["steps_to_threshold"] == {
        "count": 3, "censored": 2, "mean": None, "deviation": None, "interval": None
    }  # fmt: skip
    assert grpo["cells"][0]["run"] == "cells/grpo-dapo/seed_1"
    assert grpo["accuracy"]["toy"]["mean"] == pytest.approx(0.2)
    assert data["experiments"]["GPG"]["cells"][1] == {"seed": 2, "run": "cells/gpg/seed_2", "finished": False}
    curve = data["curves"]["TEPO"]["reward/mean"]
    np.testing.assert_allclose(curve["mean"], [0.8 / 3, 1.4 / 3, 2.2 / 3, 2.6 / 3], rtol=1e-5)
    np.testing.assert_allclose(curve["deviation"], np.std(REWARDS["TEPO"], axis=0, ddof=1), rtol=1e-5)
    assert (curve["low"][0], curve["high"][0]) == (0.2, 0.4)
    assert data["curves"]["GPG"]["reward/mean"]["low"] == [None, None]  # one run
    assert data["curves"].keys() == {"TEPO", "GRPO/DAPO", "masked KL", "GPG"}
    assert data["curves"]["GRPO/DAPO"].keys() == {"reward/mean"}


def test_a_figure_is_the_mean_of_smoothed_runs_in_its_band(made, monkeypatch):
    saved = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.update({path.name: figure}))
    write_report(*made)
    reward, norm = saved["figure_3.png"].axes
    tepo, gpg, masked = reward.lines
    smooth = np.array([running_mean(np.array(run)) for run in REWARDS["TEPO"]])
    np.testing.assert_allclose(tepo.get_xydata().T, [[1, 2, 3, 4], smooth.mean(axis=0)])
    np.testing.assert_allclose(gpg.get_ydata(), [0.5, 0.5])
    np.testing.assert_allclose(masked.get_ydata(), smooth[0])
    band = reward.collections[0].get_paths()[0].vertices
    first = band[band[:, 0] == 1, 1]
    assert (first.min(), first.max()) == (smooth[:, 0].min(), smooth[:, 0].max())  # of three: their range
    (legend,) = saved["figure_3.png"].legends
    assert [text.get_text() for text in legend.get_texts()] == ["TEPO (3)", "GPG (1)", "masked KL (1)"]
    assert (reward.get_title(), norm.get_title()) == ("Mean reward", "Gradient norm")
    np.testing.assert_allclose(norm.lines[0].get_ydata(), [2, 2, 2, 2])
    assert len(norm.lines) == 2  # GPG has no gradient norms


def test_pictures_are_files_that_the_report_shows(made):
    write_report(*made)
    assert (made[2] / "figure_3.png").read_bytes().startswith(b"\x89PNG")
    assert "![Figure 3](figure_3.png)" in (made[2] / "report.md").read_text()


def test_nothing_finished_is_a_report_too(folder):
    study = load_study(write_study(folder / "s.yaml", **(STUDY | {"base": ["data.evaluation=[]"]})))
    plan = make_plan(study, folder / "out", lambda config: None)
    (folder / "out").mkdir()
    write_report(study, plan, folder / "out")
    report = (folder / "out/report.md").read_text()
    assert row(report, "Table 1: training", "TEPO") == ["0 of 3", *["-"] * 8]
    assert row(report, "Claims", "accuracy")[2:] == [
        "-",
        "0 / 0",
        "not decided by these seeds",
    ]
    assert "accuracy after training" not in report
