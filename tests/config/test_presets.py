"""Every preset that is shipped composes, and says what the code behind it takes."""

from typing import get_args

import pytest
import yaml

from tepo_nemo.config.load import load_config
from tepo_nemo.config.presets import choices, config_folder, method_keys
from tepo_nemo.config.schema import AlgorithmConfig
from tepo_nemo.errors import UserError
from tepo_nemo.objectives import registry
from tepo_nemo.objectives.advantage import AdvantageEstimator
from tepo_nemo.study.plan import make_plan
from tepo_nemo.study.schema import load_study

# What a preset needs of others: the toy has no room for answers of 8192 tokens, and a real model is spread.
COMPANY = {
    ("data", "math"): ["model.encoder_seq_length=10240"],
    ("experiment", "paper"): ["model=qwen2_5_7b"],
    ("rollout", "trtllm"): ["model=qwen2_5_7b", "hardware=h100x8"],
    **{("model", name): ["hardware=h100x8"] for name in choices()["model"] if name != "toy"},
}
PRESETS = [(group, name) for group, names in choices().items() for name in names]


def test_every_file_of_the_folder_is_a_preset_a_study_or_the_root():
    files = {str(path.relative_to(config_folder())) for path in config_folder().rglob("*.yaml")}
    studies = {name for name in files if name.startswith("study/")}  # see tests/study
    assert files - studies == {"tepo.yaml"} | {f"{group}/{name}.yaml" for group, name in PRESETS}


def test_every_file_of_the_folder_validates():
    """Presets and the root as they are composed, studies with all of their cells."""
    load_config()
    for group, name in PRESETS:
        try:
            load_config([f"{group}={name}", *COMPANY.get((group, name), ())])
        except UserError as refusal:
            pytest.fail(f"{group}/{name}.yaml: {refusal}")
    for path in (config_folder() / "study").glob("*.yaml"):
        assert make_plan(load_study(path), path.parent, check=lambda config: None).cells()


@pytest.mark.parametrize("name", choices()["algorithm"])
def test_algorithm_preset_states_every_option_of_its_objective(name):
    algorithm = load_config([f"algorithm={name}"]).algorithm
    objective = registry.build(algorithm.name, algorithm.options)
    preset = yaml.safe_load((config_folder() / "algorithm" / f"{name}.yaml").read_text())
    assert set(preset) == set(type(objective).model_fields) | set(AlgorithmConfig.model_fields)
    assert set(preset) == method_keys(algorithm.name)


def test_advantages_are_those_that_the_objectives_know():
    assert get_args(AlgorithmConfig.model_fields["advantage"].annotation) == get_args(AdvantageEstimator)
