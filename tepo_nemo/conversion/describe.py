"""The `config.json` of a model that comes from no folder of Hugging Face, where it could have."""

import json
from collections.abc import Mapping
from typing import Any

from tepo_nemo.conversion.families import FAMILIES, FIELDS, Architecture
from tepo_nemo.errors import UserError

# What NeMo and Megatron-core take for a key that is not given.
_DEFAULTS = {"layernorm_epsilon": 1e-5, "rotary_base": 10000, "qkv_bias": False, "qk_layernorm": False}
# Keys that make another model of it; no family has them.
_NOTHING = (
    "num_moe_experts", "window_size", "seq_len_interpolation_factor", "scale_positional_embedding",
    "apply_query_key_layer_scaling",
)  # fmt: skip
_SAME_FUNCTION = {"swiglu": "fast-swiglu"}


def describe(model: Mapping[str, Any], *, vocabulary: int, stop_token: int) -> bytes | None:
    """A `config.json` that means the same model, or None where no family of `families` does.

    Args:
        model: NeMo's model configuration.
        vocabulary: of the true vocabulary.
        stop_token: id that ends a text.
    """
    given = {key: value for key, value in model.items() if value is not None}
    if any(given.get(key) for key in _NOTHING):
        return None
    heads, hidden = given["num_attention_heads"], given["hidden_size"]
    nemo = (
        _DEFAULTS
        | {
            "num_query_groups": heads,
            "kv_channels": hidden // heads,
            "rotary_percentage": 1.0,
            "max_position_embeddings": given.get("encoder_seq_length"),
        }
        | given
    )
    nemo["activation"] = _SAME_FUNCTION.get(nemo.get("activation"), nemo.get("activation"))
    for family in FAMILIES.values():
        text = json.dumps(
            {theirs: nemo[ours] for ours, theirs in FIELDS.items()}
            | {
                "architectures": [family.architecture],
                "model_type": family.architecture.removesuffix("ForCausalLM").lower(),
                "head_dim": nemo["kv_channels"],
                "hidden_act": "silu",
                "rope_theta": nemo["rotary_base"],
                "torch_dtype": "bfloat16" if str(nemo.get("precision")).startswith("bf16") else "float32",
                "vocab_size": vocabulary,
                "eos_token_id": stop_token,
            },
            indent=2,
        ).encode()
        if _means(text, nemo):
            return text
    return None


def _means(text: bytes, nemo: Mapping[str, Any]) -> bool:
    """Whether NeMo's keys that follow from a `config.json` are those of the model."""
    try:
        meant = Architecture.of(text, "config.json").nemo
    except UserError:
        return False
    return all(nemo.get(key) == value for key, value in meant.items())
