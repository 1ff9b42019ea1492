"""The real models: their published config.json, the shipped presets, and the published number of weights."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tepo_nemo.config.presets import config_folder
from tepo_nemo.conversion.families import Architecture
from tepo_nemo.conversion.nemo_config import nemo_config
from tepo_nemo.conversion.weights import huggingface_shapes

_QWEN2_5 = dict(
    architectures=["Qwen2ForCausalLM"],
    hidden_act="silu",
    max_position_embeddings=131072,
    rope_theta=1000000.0,
    sliding_window=131072,
    use_sliding_window=False,
    use_mrope=False,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=152064,
)
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2_5_7b": (
        _QWEN2_5
        | dict(
            hidden_size=3584,
            intermediate_size=18944,
            num_attention_heads=28,
            num_hidden_layers=28,
            num_key_value_heads=4,
            rms_norm_eps=1e-06,
            max_window_layers=28,
        ),
        7_615_616_512,
    ),
    "qwen2_5_14b": (
        _QWEN2_5
        | dict(
            hidden_size=5120,
            intermediate_size=13824,
            num_attention_heads=40,
            num_hidden_layers=48,
            num_key_value_heads=8,
            rms_norm_eps=1e-05,
            max_window_layers=48,
        ),
        14_770_033_664,
    ),
    "qwen3_14b": (
        dict(
            architectures=["Qwen3ForCausalLM"],
            attention_bias=False,
            head_dim=128,
            hidden_act="silu",
            hidden_size=5120,
            intermediate_size=17408,
            max_position_embeddings=40960,
            max_window_layers=40,
            num_attention_heads=40,
            num_hidden_layers=40,
            num_key_value_heads=8,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            use_sliding_window=False,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            vocab_size=151936,
        ),
        14_768_307_200,
    ),
    "r1_distill_llama_8b": (
        dict(
            architectures=["LlamaForCausalLM"],
            attention_bias=False,
            mlp_bias=False,
            head_dim=128,
            hidden_act="silu",
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=131072,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            pretraining_tp=1,
            rms_norm_eps=1e-05,
            rope_scaling=dict(
                factor=8.0,
                high_freq_factor=4.0,
                low_freq_factor=1.0,
                original_max_position_embeddings=8192,
                rope_type="llama3",
            ),
            rope_theta=500000.0,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            vocab_size=128256,
        ),
        8_030_261_248,
    ),
    "mistral_7b_instruct": (
        dict(
            architectures=["MistralForCausalLM"],
            hidden_act="silu",
            hidden_size=4096,
            intermediate_size=14336,
            max_position_embeddings=32768,
            num_attention_heads=32,
            num_hidden_layers=32,
            num_key_value_heads=8,
            rms_norm_eps=1e-05,
            rope_theta=1000000.0,
            sliding_window=None,
            tie_word_embeddings=False,
            torch_dtype="bfloat16",
            vocab_size=32000,
        ),
        7_241_732_096,
    ),
}


def architecture_of(config: dict[str, Any]) -> Architecture:
    return Architecture.of(json.dumps(config).encode(), "config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_published_weights_are_on_the_list(name: str) -> None:
    config, count = PUBLISHED[name]
    shapes = huggingface_shapes(architecture_of(config))
    assert sum(math.prod(shape) for shape in shapes.values()) == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_preset_says_of_the_model_what_the_conversion_says(name: str) -> None:
    """Else the converted model would be refused, or a key that one of them lacks would have its default."""
    preset = yaml.safe_load((config_folder() / "model" / f"{name}.yaml").read_text())["model"]
    text = nemo_config(architecture_of(PUBLISHED[name][0]), tokenizer=Path("t"), sequence_length=None)
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
    config, _ = PUBLISHED["r1_distill_llama_8b"]
    moved = {
        key: value
        for key, value in config.items()
        if key not in ("rope_scaling", "rope_theta", "torch_dtype")
    }
    moved["rope_parameters"] = config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
    moved["dtype"] = config["torch_dtype"]
    assert architecture_of(moved) == architecture_of(config)


def test_a_switched_off_window_is_none() -> None:
    config, _ = PUBLISHED["qwen2_5_7b"]
    assert architecture_of(config).sliding_window is None
    assert architecture_of(config | {"use_sliding_window": True}).sliding_window == 131072
    assert (
        architecture_of(PUBLISHED["mistral_7b_instruct"][0] | {"sliding_window": 4096}).sliding_window == 4096
    )
