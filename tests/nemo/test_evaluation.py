"""`tepo-nemo eval` on the toy: the same answers and scores at every layout, interrupted or not."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.evaluating import evaluate
from support.layouts import LAYOUTS, Given
from support.toy import ToyFolder
from support.worlds import Worlds

from tepo_nemo.config.load import dump_config
from tepo_nemo.config.schema import Config
from tepo_nemo.evaluation.records import ProblemRecord, RecordFile
from tepo_nemo.launch.evaluate import subject_of
from tepo_nemo.runs.evaluation import EvaluationDirectory

pytestmark = pytest.mark.timeout(300)

PROBLEMS = 9
BATCHES = 3  # that an interrupted evaluation has written down, of 3 greedy ones and 5 sampled ones


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums, of which the training set of the toy folder has 1+1= alone."""
    path = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    rows = [{"id": f"p{n}", "prompt": f"{n}+1=", "gold": str((n + 1) % 10)} for n in range(PROBLEMS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluation(
    layout: str, toy: ToyFolder, given: Callable[[bool], Given], problems: Path, output: Path
) -> Config:
    """A greedy benchmark and a sampled one, three problems at once; the directory is opened."""
    config = LAYOUTS[layout].config(
        toy,
        *given(False).overrides,
        "data.reward=support.evaluating.holds_the_digit",
        f"data.evaluation=[{{name:greedy,path:{problems}}},"
        f"{{name:sampled,path:{problems},samples:4,temperature:0.6,k:[2]}}]",
        f"rollout.batch_size={3 if layout != 'dp2' else 2}",
        f"output={output}",
    )
    EvaluationDirectory.open(output, dump_config(config), subject_of(config))
    return config


def records(output: Path) -> list[ProblemRecord]:
    return sorted(
        RecordFile(EvaluationDirectory(output).problems).read(), key=lambda each: (each.benchmark, each.id)
    )


@pytest.fixture(scope="module")
def whole(
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
    problems: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An evaluation at TP1 that nothing has interrupted."""
    output = tmp_path_factory.mktemp("whole") / "scores"
    (console,) = worlds(1, stack="nemo").run(
        evaluate, evaluation("tp1", toy, given, problems, output), timeout=110
    )
    assert "greedy  9/9 problems" in console
    return output


def test_every_problem_is_answered_once(whole: Path) -> None:
    found = records(whole)
    assert Counter(record.benchmark for record in found) == {"greedy": PROBLEMS, "sampled": PROBLEMS}
    assert len({(record.benchmark, record.id) for record in found}) == 2 * PROBLEMS
    assert {len(record.answers) for record in found if record.benchmark == "sampled"} == {4}
    assert len({answer.response for record in found for answer in record.answers}) > PROBLEMS


def test_the_report_is_that_of_the_records(whole: Path) -> None:
    """Recomputed from the responses; 1+1= is in the training set."""
    report = json.loads(EvaluationDirectory(whole).report.read_text())["benchmarks"]
    for name, score in report.items():
        of_set = [record for record in records(whole) if record.benchmark == name]
        right = {
            record.id: [record.gold in answer.response for answer in record.answers] for record in of_set
        }
        shares = {id: sum(flags) / len(flags) for id, flags in right.items()}
        assert score["average"]["value"] == pytest.approx(sum(shares.values()) / PROBLEMS)
        assert score["overlapping"] == 1
        clean = [share for id, share in shares.items() if id != "p1"]
        assert score["without_overlap"]["average"]["value"] == pytest.approx(sum(clean) / (PROBLEMS - 1))
        answers = [answer for record in of_set for answer in record.answers]
        assert score["mean_length"] == pytest.approx(sum(answer.length for answer in answers) / len(answers))
        assert score["truncated"] == pytest.approx(sum(answer.truncated for answer in answers) / len(answers))
    assert set(report["sampled"]["pass_at"]) == {"2", "4"}
    assert report["greedy"]["pass_at"] == {}


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_every_layout_gives_the_same_answers_and_scores(
    whole: Path,
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
    problems: Path,
    tmp_path: Path,
    layout: str,
) -> None:
    config = evaluation(layout, toy, given, problems, tmp_path / "scores")
    consoles = worlds(2, stack="nemo").run(evaluate, config, timeout=110)
    assert consoles[1] == ""
    assert records(config.output) == records(whole)
    assert (config.output / "report.json").read_text() == (whole / "report.json").read_text()


def test_an_interrupted_evaluation_goes_on_without_counting_twice(
    whole: Path,
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
    problems: Path,
    tmp_path: Path,
) -> None:
    """Interrupted at TP2 in the midst of a line, continued at TP1."""
    config = evaluation("tp2", toy, given, problems, tmp_path / "scores")
    with pytest.raises(Exception, match="Interrupted"):
        worlds(2, stack="nemo").run(evaluate, config, BATCHES, timeout=110)
    content = (config.output / "problems.jsonl").read_bytes()
    assert not content.endswith(b"\n")
    assert 0 < content.count(b"\n") < 2 * PROBLEMS
    config = evaluation("tp1", toy, given, problems, tmp_path / "scores")
    worlds(1, stack="nemo").run(evaluate, config, timeout=110)
    assert (config.output / "problems.jsonl").read_bytes().startswith(content[: content.rfind(b"\n") + 1])
    assert records(config.output) == records(whole)
    assert (config.output / "report.json").read_text() == (whole / "report.json").read_text()
