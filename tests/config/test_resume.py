"""What a run may change when it goes on, and how the rest is refused."""

from pathlib import Path

import pytest

from tepo_nemo.config.flat import flat
from tepo_nemo.config.load import dump_config, load_config
from tepo_nemo.config.resume import MAY_CHANGE, check_same_run, fingerprint, read_saved
from tepo_nemo.errors import UserError


def test_every_key_that_may_change_is_one() -> None:
    keys = flat(load_config(["rollout=server"])).keys()  # an empty list has no items to name
    assert MAY_CHANGE <= keys | {key.rpartition(".")[0] for key in keys}


@pytest.mark.parametrize(
    "change",
    [
        "output=elsewhere",
        "trainer.max_steps=100",
        "trainer.max_time=1:00:00",
        "model.tensor_model_parallel_size=2 hardware.devices_per_node=2",
        "trainer.micro_batch_size=4",
        "trainer.save_interval=5 trainer.keep_best=1",
        "data.grading.workers=2",
        "rollout.batch_size=64",
        "trainer.trackers=[]",
        "data.train=toy/test.jsonl",  # its content is compared
    ],
)
def test_what_changes_no_number_may_change(change: str) -> None:
    begun, now = load_config(), load_config(change.split())
    check_same_run(now, begun, Path("run"))
    assert fingerprint(now) == fingerprint(begun)


def test_a_run_goes_on_with_other_servers() -> None:
    begun = load_config(["rollout=server"])
    now = load_config(["rollout=server", "rollout.server.urls=[http://a:1,http://b:1]"])
    check_same_run(now, begun, Path("run"))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("seed=2", "seed=2: the run in run has seed=1"),
        ("algorithm=grpo", "algorithm.name=grpo: the run in run has algorithm.name=tepo"),
        (
            "trainer.optimizer.learning_rate=1e-3",
            "trainer.optimizer.learning_rate=0.001: the run in run has trainer.optimizer.learning_rate=1e-06",
        ),
        ("rollout.responses_per_prompt=4", "rollout.responses_per_prompt=4: the run in run has"),
        ("data.evaluation=[]", "data.evaluation.0.name=null: the run in run has data.evaluation.0.name=toy"),
        ("model.num_layers=4", "model.num_layers=4: the run in run has model.num_layers=2"),
    ],
)
def test_the_rest_is_refused_with_both_values(change: str, line: str) -> None:
    begun, now = load_config(), load_config([change])
    with pytest.raises(UserError) as mistake:
        check_same_run(now, begun, Path("run"))
    assert str(mistake.value).startswith(line)
    assert str(mistake.value).endswith(
        "and cannot go on with another (set it to that, or choose another output)"
    )
    assert fingerprint(now) != fingerprint(begun)


def test_a_key_at_its_default_leaves_no_fingerprint() -> None:
    """So that checkpoints are taken by a version that has keys which the one that wrote them had not."""
    config = load_config(["trainer.optimizer.eps=1e-8", "trainer.warmup_steps=0", "trainer.max_steps=5"])
    assert fingerprint(config) == fingerprint(load_config())
    assert fingerprint(load_config(["trainer.warmup_steps=1"])) != fingerprint(load_config())


def test_what_is_read_back_is_what_was_saved(tmp_path: Path) -> None:
    begun = load_config(["trainer.max_time=1-00:00:00"])
    (tmp_path / "config.yaml").write_text(dump_config(begun))
    for path in tmp_path.glob("toy/*.jsonl"):
        path.unlink()  # it is compared, not trained with
    assert read_saved(tmp_path / "config.yaml") == begun


def test_a_configuration_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config()) + "gone: 1\n")
    with pytest.raises(UserError, match=r"config.yaml: gone: unknown key"):
        read_saved(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("value", "seconds"), [("0:00:30", 30), ("01:30:00", 5400), ("2-03:04:05", 183845), ("100:00:00", 360000)]
)
def test_time_limits(value: str, seconds: float) -> None:
    assert load_config([f"trainer.max_time={value}"]).trainer.max_seconds == seconds
