import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from pydantic import ValidationError
from support.toy_files import make_archive

import tepo_nemo
from tepo_nemo.config.load import dump_config, load_config
from tepo_nemo.config.presets import choices, config_folder
from tepo_nemo.errors import UserError


def saved(tmp_path: Path, *overrides: str) -> Path:
    path = tmp_path / "saved.yaml"
    path.write_text(dump_config(load_config(overrides)))
    return path


def test_no_override_is_tepo_on_the_toy_on_one_cpu_process():
    config = load_config()
    assert (config.model.name, config.algorithm.name, config.rollout.backend) == ("toy", "tepo", "megatron")
    assert (config.hardware.accelerator, config.layout.world) == ("cpu", 1)


def test_toy_cpu_is_the_papers_batch_on_two_processes():
    config = load_config(["experiment=toy_cpu"])
    layout = config.layout
    assert (config.rollout.prompts_per_step, config.rollout.responses_per_prompt) == (64, 8)
    assert (config.trainer.updates_per_rollout, config.trainer.max_steps) == (8, 72)
    assert (layout.world, layout.tensor, layout.responses_per_update) == (2, 2, 64)


def test_chain_cpu_is_a_small_batch_on_one_process():
    config = load_config(["experiment=chain_cpu"])
    layout = config.layout
    assert (config.rollout.prompts_per_step, config.rollout.responses_per_prompt) == (16, 8)
    assert (layout.world, layout.tensor, layout.responses_per_update) == (1, 1, 16)
    assert config.data.train == Path.cwd() / "chain/train.jsonl"
    assert [part.name for part in config.data.reward] == ["last_answer"]


def test_a_choice_on_the_command_line_beats_the_experiment():
    config = load_config(["experiment=toy_cpu", "algorithm=grpo", "trainer.max_steps=3"])
    assert config.algorithm.name == "grpo"
    assert "dual_clip" in config.algorithm.options  # GRPO's own
    assert "kl_mask" not in config.algorithm.options  # TEPO's own
    assert config.trainer.max_steps == 3
    assert config.layout.world == 2  # still the experiment's


def test_the_order_of_overrides_does_not_matter_for_choices_and_the_last_key_wins():
    first = load_config(["trainer.max_steps=3", "algorithm=grpo", "algorithm.kl_coefficient=0.5"])
    second = load_config(
        ["algorithm.kl_coefficient=0.5", "algorithm=grpo", "trainer.max_steps=2", "trainer.max_steps=3"]
    )
    assert first == second
    assert first.algorithm.options["kl_coefficient"] == 0.5


@pytest.mark.parametrize("overrides", [[], ["experiment=toy_cpu"], ["algorithm=grpo"]])
def test_saved_configuration_loads_to_an_equal_one(tmp_path, overrides):
    config = load_config(overrides)
    assert load_config(config_file=saved(tmp_path, *overrides)) == config


def test_saved_configuration_keeps_values_that_yaml_or_json_could_lose(tmp_path):
    overrides = [
        "algorithm.clip_high=inf",
        "trainer.optimizer.learning_rate=1e-6",
        "trainer.optimizer.betas=[0.8,0.9]",
        "model.precision=32",
        "model.extra={on: {deep: [1, 2.5, null]}}",
        "model.layernorm_epsilon=1e-5",
        "data.evaluation=[{name: 'yes', path: toy/test.jsonl}]",
        "data.reward=exact_answer",
    ]
    config = load_config(config_file=saved(tmp_path, *overrides))
    assert config == load_config(overrides)
    assert math.isinf(config.algorithm.options["clip_high"])
    assert config.trainer.optimizer.learning_rate == 1e-6
    assert config.trainer.optimizer.betas == (0.8, 0.9)
    assert config.model.precision == "32"
    assert config.model.extra == {"on": {"deep": [1, 2.5, None]}}
    assert config.model.model_extra["layernorm_epsilon"] == 1e-5
    assert config.data.evaluation[0].name == "yes"


def test_overrides_apply_on_top_of_a_saved_configuration(tmp_path):
    path = saved(tmp_path, "experiment=toy_cpu", "seed=5")
    config = load_config(
        ["seed=6", "rollout.prompts_per_step=16", "trainer.micro_batch_size=1", "~model.num_query_groups"],
        path,
    )
    assert (config.seed, config.rollout.prompts_per_step, config.trainer.max_steps) == (6, 16, 72)
    assert config.model.num_query_groups is None


def test_saved_configuration_means_the_same_from_another_folder(tmp_path, monkeypatch):
    config, path = load_config(), saved(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = load_config(config_file=path)
    assert (again.data.train, again.output) == (tmp_path / "toy/train.jsonl", tmp_path / "runs/tepo")
    assert again.data == config.data


def test_the_saved_file_may_have_any_name(tmp_path):
    odd = tmp_path / "my config=1 @ 2.yml"
    shutil.copy(saved(tmp_path), odd)
    assert load_config(config_file=odd) == load_config()


def test_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(['output="~/run"']).output == tmp_path / "run"


def test_interpolation_and_quoting():
    config = load_config(["seed=7", "trainer.warmup_steps=${seed}", 'output="/tmp/a=b"'])
    assert config.trainer.warmup_steps == 7
    assert config.output == Path("/tmp/a=b")


def test_a_key_that_only_the_schema_has_can_be_set():
    assert "warmup_steps" not in (config_folder() / "tepo.yaml").read_text()
    assert load_config(["trainer.warmup_steps=4"]).trainer.warmup_steps == 4
    assert load_config(["+trainer.warmup_steps=4"]).trainer.warmup_steps == 4


def test_a_removed_key_falls_back_to_its_default():
    assert (
        load_config(
            ["experiment=toy_cpu", "~trainer.optimizer.learning_rate"]
        ).trainer.optimizer.learning_rate
        == 1e-6
    )


def test_nothing_of_hydra_is_left(tmp_path):
    before = sorted(tmp_path.rglob("*"))
    config = load_config(["experiment=toy_cpu"])
    assert set(yaml.safe_load(dump_config(config))) == {
        "seed", "output", "replay", "model", "algorithm", "data", "rollout", "trainer", "hardware"
    }  # fmt: skip
    assert sorted(tmp_path.rglob("*")) == before  # no outputs/ folder, no log
    assert not GlobalHydra.instance().is_initialized()


def test_configuration_is_immutable():
    config = load_config()
    with pytest.raises(ValidationError):
        config.trainer.max_steps = 3


def test_a_checkpoint_stands_in_for_the_architecture(tmp_path):
    make_archive(tmp_path / "start.nemo")
    config = load_config(
        ["model.restore_from_path=start.nemo", "~model.num_layers", "~model.hidden_size", "~model.tokenizer"]
    )
    assert (config.model.num_layers, config.model.hidden_size, config.model.tokenizer) == (None, None, None)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda content: content[:520], "unexpected end of data"),
        (lambda content: content[:300], "truncated header"),
        (lambda content: b"", "empty file"),
        (lambda content: b"not an archive" * 100, "invalid header"),
    ],
)
def test_a_cut_or_foreign_checkpoint_is_refused(tmp_path, damage, fault):
    whole = tmp_path / "whole.nemo"
    make_archive(whole)  # 10240 bytes, of which the header and the content are 1024
    (tmp_path / "cut.nemo").write_bytes(damage(whole.read_bytes()))
    with pytest.raises(UserError) as refusal:
        load_config(["model.restore_from_path=cut.nemo"])
    path = tmp_path / "cut.nemo"
    assert str(refusal.value) == (
        f"model.restore_from_path={path}: is no whole .nemo archive ({fault}; copy or make it again, or give "
        "an extracted folder)"
    )


def test_an_archive_of_something_else_is_refused(tmp_path):
    make_archive(tmp_path / "other.nemo", "weights.ckpt")
    with pytest.raises(UserError, match=r"is no whole .nemo archive \(it has no model_config.yaml;"):
        load_config(["model.restore_from_path=other.nemo"])


def test_a_configuration_can_be_looked_at_without_its_files(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_config(["experiment=paper_qwen2_5_7b"], files=False).model.name == "qwen2_5_7b"
    with pytest.raises(UserError, match=r"^model.restore_from_path=.*: no such checkpoint"):
        load_config(["experiment=paper_qwen2_5_7b"])


def test_several_cpu_nodes_are_fine():
    assert load_config(["hardware.nodes=2"]).layout.world == 2


def test_presets_of_an_installed_package_are_found(tmp_path):
    """A package without a checkout around it carries configs/ inside."""
    package = Path(tepo_nemo.__file__).parent
    shutil.copytree(package, tmp_path / "site" / "tepo_nemo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(config_folder(), tmp_path / "site" / "tepo_nemo" / "configs", dirs_exist_ok=True)
    program = (
        "from tepo_nemo.config.presets import config_folder; from tepo_nemo.config.load import load_config;"
        "print(config_folder(), load_config(['experiment=toy_cpu']).layout.world)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == [str(tmp_path / "site/tepo_nemo/configs"), "2"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read (No such file"),
        (b"a: [1", "is no valid YAML"),
        (b"a: 1\na: 2\n", "is no valid YAML"),
        (b"\xff\xfe\x00", "is no valid YAML"),
        (b"- 1\n- 2\n", "is no configuration"),
    ],
)
def test_a_broken_saved_file_is_named(tmp_path, content, complaint):
    path = tmp_path / "broken.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as refusal:
        load_config(config_file=path)
    assert str(refusal.value).startswith(f"{path}: {complaint}")
    assert "\n" not in str(refusal.value)


def test_an_empty_saved_file_misses_its_sections(tmp_path):
    path = tmp_path / "empty.yaml"
    path.touch()
    with pytest.raises(UserError, match=r"^model: is missing \(set model=\.\.\.\)$"):
        load_config(config_file=path)


def test_presets_cannot_be_chosen_on_top_of_a_saved_file(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(UserError) as refusal:
        load_config(["algorithm=grpo"], path)
    assert str(refusal.value) == (
        f"algorithm=grpo: presets cannot be chosen on top of {path} (set single keys, such as "
        "algorithm.KEY=VALUE)"
    )


def test_choices_are_the_files_of_the_folder():
    assert choices()["model"] == tuple(sorted(path.stem for path in config_folder().glob("model/*.yaml")))
    assert "experiment" in choices()
