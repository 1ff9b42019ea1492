"""A config.json for models that come from no folder of Hugging Face."""

import json
from pathlib import Path

import pytest
import yaml

from tepo_nemo.conversion.describe import describe
from tepo_nemo.conversion.families import Architecture

TOY = yaml.safe_load((Path(__file__).parents[2] / "configs/model/toy.yaml").read_text()) | {"precision": 32}


def described(**changes: object) -> dict | None:
    text = describe(TOY | changes, vocabulary=17, stop_token=2)
    return None if text is None else json.loads(text)


def test_the_toy_is_a_llama() -> None:
    """Key by key, by hand; what the configuration leaves out is what NeMo takes for it."""
    assert described() == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "vocab_size": 17,
        "eos_token_id": 2,
    }


@pytest.mark.parametrize(
    ("changes", "architecture"),
    [
        ({"activation": "swiglu"}, "LlamaForCausalLM"),
        ({"qkv_bias": True}, "Qwen2ForCausalLM"),
        ({"qk_layernorm": True, "kv_channels": 64}, "Qwen3ForCausalLM"),
        ({"share_embeddings_and_output_weights": True, "num_query_groups": 2}, "LlamaForCausalLM"),
    ],
)
def test_families_are_told_apart(changes: dict[str, object], architecture: str) -> None:
    found = described(**changes)
    assert found["architectures"] == [architecture]
    meant = Architecture.of(json.dumps(found).encode(), "config.json")
    for key, value in changes.items():
        assert key == "activation" or meant.nemo[key] == value


@pytest.mark.parametrize(
    "changes",
    [
        {"normalization": "layernorm"},
        {"activation": "geglu"},
        {"bias": True},
        {"position_embedding_type": "learned_absolute"},
        {"rotary_percentage": 0.5},
        {"qkv_bias": True, "qk_layernorm": True},
        {"num_moe_experts": 4},
        {"window_size": [8, 0]},
        {"seq_len_interpolation_factor": 2},
        {"scale_positional_embedding": True},
    ],
)
def test_other_models_are_of_no_family(changes: dict[str, object]) -> None:
    assert described(**changes) is None
