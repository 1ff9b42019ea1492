"""The directory of an evaluation: made, gone on in, and never mixed with another one."""

import pytest

from tepo_nemo.errors import UserError
from tepo_nemo.runs.evaluation import EvaluationDirectory

SUBJECT = {"seed": 1, "benchmarks": {"amc": {"temperature": 0.6}}}


def test_the_same_evaluation_goes_on(tmp_path):
    first = EvaluationDirectory.open(tmp_path / "deep" / "scores", "seed: 1\n", SUBJECT)
    first.problems.write_text("{}\n")
    again = EvaluationDirectory.open(tmp_path / "deep" / "scores", "seed: 1\nlayout: 2\n", SUBJECT)
    assert again.problems.read_text() == "{}\n"
    assert again.config.read_text() == "seed: 1\nlayout: 2\n"
    assert again.logs.is_dir()


@pytest.mark.parametrize("other", [SUBJECT | {"seed": 2}, {"seed": 1}, SUBJECT | {"more": 1}])
def test_another_evaluation_is_refused(tmp_path, other):
    directory = EvaluationDirectory.open(tmp_path / "scores", "seed: 1\n", SUBJECT)
    with pytest.raises(UserError, match="scores: is an evaluation with (seed 1|benchmarks|more None)"):
        EvaluationDirectory.open(tmp_path / "scores", "other", other)
    assert directory.config.read_text() == "seed: 1\n"


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not empty"):
        EvaluationDirectory.open(tmp_path, "", SUBJECT)
    with pytest.raises(UserError, match="is a file"):
        EvaluationDirectory.open(tmp_path / "file", "", SUBJECT)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"output={tmp_path}/file/scores: cannot be written"):
        EvaluationDirectory.open(tmp_path / "file" / "scores", "", SUBJECT)
