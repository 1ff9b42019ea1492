"""Every preset that is shipped composes, and says what the code behind it takes."""

from typing import get_args

import pytest

from tepo_nemo.config.load import load_config
from tepo_nemo.config.presets import choices, config_folder, method_keys
from tepo_nemo.config.schema import AlgorithmConfig
from tepo_nemo.objectives import registry
from tepo_nemo.objectives.advantage import AdvantageEstimator

PRESETS = [(group, name) for group, names in choices().items() for name in names]


def test_every_file_of_the_folder_is_a_preset_or_the_root():
    files = {str(path.relative_to(config_folder())) for path in config_folder().rglob("*.yaml")}
    assert files == {"tepo.yaml"} | {f"{group}/{name}.yaml" for group, name in PRESETS}


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_preset_composes(group, name):
    load_config([f"{group}={name}"])


@pytest.mark.parametrize("name", choices()["algorithm"])
def test_algorithm_preset_builds_its_objective(name):
    algorithm = load_config([f"algorithm={name}"]).algorithm
    registry.build(algorithm.name, algorithm.options)


@pytest.mark.parametrize("method", registry.known())
def test_method_with_presets_has_exactly_the_keys_of_its_objective_and_the_shared_ones(method):
    keys = method_keys(method)
    if not keys:
        pytest.skip("a method without a preset: options are its objective's alone")
    objective = registry._find(method)
    assert keys == set(objective.model_fields) | set(AlgorithmConfig.model_fields)


def test_advantages_are_those_that_the_objectives_know():
    assert get_args(AlgorithmConfig.model_fields["advantage"].annotation) == get_args(AdvantageEstimator)
