"""What is refused before a rank is started."""

import pytest
from support.toy_files import make_toy_files

from tepo_nemo.config.load import load_config
from tepo_nemo.config.presets import choices
from tepo_nemo.errors import UserError
from tepo_nemo.launch.preflight import check_run
from tepo_nemo.runs import trackers


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_toy_files(tmp_path)
    return tmp_path


@pytest.mark.parametrize("algorithm", choices()["algorithm"])
def test_every_shipped_method_passes(algorithm):
    check_run(load_config([f"algorithm={algorithm}"]))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.surrogate=clipped", "algorithm.surrogate"),
        ("algorithm.kl_coefficient=-1", "algorithm.kl_coefficient"),
        ("algorithm.name=tepoo", "tepo"),
        ("algorithm=clip_cov algorithm.covariance_high=0.5", "algorithm.covariance_high"),
        ("data.reward=exact", "exact_answer"),
    ],
)
def test_a_wrong_method_option_or_reward_is_refused(override, said):
    with pytest.raises(UserError, match=said):
        check_run(load_config(override.split()))


def test_a_broken_prompt_set_is_refused(folder):
    (folder / "toy" / "train.jsonl").write_text("")
    with pytest.raises(UserError, match=r"train.jsonl: has no prompts"):
        check_run(load_config([]))


def test_a_replay_of_nothing_is_refused(folder):
    with pytest.raises(UserError, match=r"replay=.*toy: holds no rollout"):
        check_run(load_config([f"replay={folder / 'toy'}"]))


def test_a_broken_replay_is_refused(folder):
    (folder / "dump").mkdir()
    (folder / "dump" / "rollout.json").write_text("{}")
    with pytest.raises(UserError, match=r"replay=.*dump: cannot be used, it lacks 'format'"):
        check_run(load_config(["replay=dump"]))


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    check_run(load_config(["trainer.trackers=[tensorboard]"]))
    with pytest.raises(UserError, match=r"wandb is not installed \(pip install wandb"):
        check_run(load_config(["trainer.trackers=[tensorboard,wandb]"]))
