"""Every preset that is shipped composes, and says what the code behind it takes."""

from typing import get_args

import pytest
import yaml

from tepo_nemo.config.load import load_config
from tepo_nemo.config.presets import choices, config_folder, method_keys
from tepo_nemo.config.schema import AlgorithmConfig
from tepo_nemo.objectives import registry
from tepo_nemo.objectives.advantage import AdvantageEstimator

# What a preset needs of others: the toy has no room for answers of 8192 tokens, and a real model is spread.
COMPANY = {
    ("data", "math"): ["model.encoder_seq_length=10240"],
    ("experiment", "paper"): ["model=qwen2_5_7b"],
    **{("model", name): ["hardware=h100x8"] for name in choices()["model"] if name != "toy"},
}
PRESETS = [(group, name) for group, names in choices().items() for name in names]


def test_every_file_of_the_folder_is_a_preset_a_study_or_the_root():
    files = {str(path.relative_to(config_folder())) for path in config_folder().rglob("*.yaml")}
    studies = {name for name in files if name.startswith("study/")}  # see tests/study
    assert files - studies == {"tepo.yaml"} | {f"{group}/{name}.yaml" for group, name in PRESETS}


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_preset_composes(group, name):
    load_config([f"{group}={name}", *COMPANY.get((group, name), ())])


@pytest.mark.parametrize("name", choices()["algorithm"])
def test_algorithm_preset_states_every_option_of_its_objective(name):
    algorithm = load_config([f"algorithm={name}"]).algorithm
    objective = registry.build(algorithm.name, algorithm.options)
    preset = yaml.safe_load((config_folder() / "algorithm" / f"{name}.yaml").read_text())
    assert set(preset) == set(type(objective).model_fields) | set(AlgorithmConfig.model_fields)
    assert set(preset) == method_keys(algorithm.name)


def test_advantages_are_those_that_the_objectives_know():
    assert get_args(AlgorithmConfig.model_fields["advantage"].annotation) == get_args(AdvantageEstimator)
