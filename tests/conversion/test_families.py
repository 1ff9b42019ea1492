"""The real models: their published config.json, the shipped presets, and the published number of weights."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.published_models import PARAMETERS, PUBLISHED

from tepo_nemo.config.presets import config_folder
from tepo_nemo.conversion.families import Architecture
from tepo_nemo.conversion.nemo_config import nemo_config
from tepo_nemo.conversion.weights import huggingface_shapes


def architecture_of(config: dict[str, Any]) -> Architecture:
    return Architecture.of(json.dumps(config).encode(), "config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_published_weights_are_on_the_list(name: str) -> None:
    shapes = huggingface_shapes(architecture_of(PUBLISHED[name]))
    assert sum(math.prod(shape) for shape in shapes.values()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_preset_says_of_the_model_what_the_conversion_says(name: str) -> None:
    """Else the converted model would be refused, or a key that one of them lacks would have its default."""
    preset = yaml.safe_load((config_folder() / "model" / f"{name}.yaml").read_text())["model"]
    text = nemo_config(architecture_of(PUBLISHED[name]), tokenizer=Path("t"), sequence_length=None)
    converted = yaml.safe_load(text)
    of_the_run = {
        "name", "restore_from_path", "tokenizer", "encoder_seq_length", "vocab_size", "precision",
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel", "megatron_amp_O2",
        "activations_checkpoint_granularity",
    }  # fmt: skip
    said = {
        key: float(value) if isinstance(value, str) and "e-" in value else value
        for key, value in preset.items()
    }
    assert {key: converted.get(key) for key in said.keys() - of_the_run} == {
        key: said[key] for key in said.keys() - of_the_run
    }
    assert converted["override_vocab_size"] == said["vocab_size"]  # all five are multiples of 128
    assert converted["encoder_seq_length"] == said["max_position_embeddings"]


def test_transformers_5_writes_the_rotary_embedding_elsewhere() -> None:
    """`rope_parameters` with the base in it, and `dtype`."""
    config = PUBLISHED["r1_distill_llama_8b"]
    moved = {
        key: value
        for key, value in config.items()
        if key not in ("rope_scaling", "rope_theta", "torch_dtype")
    }
    moved["rope_parameters"] = config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
    moved["dtype"] = config["torch_dtype"]
    assert architecture_of(moved) == architecture_of(config)


def test_a_switched_off_window_is_none() -> None:
    config = PUBLISHED["qwen2_5_7b"]
    assert architecture_of(config).sliding_window is None
    assert architecture_of(config | {"use_sliding_window": True}).sliding_window == 131072
    assert architecture_of(PUBLISHED["mistral_7b_instruct"] | {"sliding_window": 4096}).sliding_window == 4096
