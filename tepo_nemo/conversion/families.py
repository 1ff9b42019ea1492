"""The model families: what a `config.json` says, and what NeMo's `model_config.yaml` says for the same model.

The tables are read in both directions: a folder of Hugging Face becomes a NeMo configuration, and a NeMo
configuration is held against the `config.json` that it came from.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tepo_nemo.errors import UserError


@dataclass(frozen=True)
class Family:
    """Models that share an architecture of `transformers`."""

    name: str
    architecture: str
    qkv_bias: bool = False
    qk_layernorm: bool = False


FAMILIES = {
    family.architecture: family
    for family in (
        Family("qwen2.5", "Qwen2ForCausalLM", qkv_bias=True),
        Family("qwen3", "Qwen3ForCausalLM", qk_layernorm=True),
        Family("llama", "LlamaForCausalLM"),
        Family("mistral", "MistralForCausalLM"),
    )
}

# NeMo's key -> the key of config.json
FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "max_position_embeddings": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
}

# NeMo's key -> the key of Llama 3.1's RoPE scaling
ROPE_SCALING_FIELDS = {
    "scale_factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "old_context_len": "original_max_position_embeddings",
}

# What all families have in common, in NeMo's words.
CONSTANT = {
    "normalization": "rmsnorm",
    "activation": "fast-swiglu",
    "bias": False,
    "position_embedding_type": "rope",
    "rotary_percentage": 1.0,
}

# Keys of config.json whose other values make another model of it; a file may leave them out.
_MUST_BE = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Sizes:
    """Of the weights."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int  # key-value heads
    head_width: int
    vocabulary: int  # rows of the embedding, without those that pad it in NeMo

    @property
    def queries(self) -> int:
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        return self.groups * self.head_width

    @property
    def qkv(self) -> int:
        return self.queries + 2 * self.keys


@dataclass(frozen=True)
class Architecture:
    """A model as a `config.json` describes it."""

    family: Family
    sizes: Sizes
    tied: bool
    dtype: str  # of all weights, in PyTorch's words
    sliding_window: int | None  # positions that a token attends to, where those are not all before it
    nemo: Mapping[str, Any]  # the keys of model_config.yaml that follow from config.json

    @classmethod
    def of(cls, text: bytes, where: str) -> "Architecture":
        """Read a `config.json`.

        Args:
            text: the file.
            where: its path, for messages.

        Raises:
            UserError: it is not JSON, lacks a key, or describes a model that the families do not cover.
        """
        config = _parse(text, where)
        family = _family(config, where)
        for key, value in _MUST_BE.items():
            if config.get(key, value) != value:
                raise UserError(
                    f"{where}: {key}={json.dumps(config[key])} is not supported, only {json.dumps(value)} is "
                    "(give another model)"
                )
        nemo = {ours: _value(config, theirs, where) for ours, theirs in FIELDS.items()}
        sizes = _sizes(config, nemo, where)
        return cls(
            family=family,
            sizes=sizes,
            tied=nemo["share_embeddings_and_output_weights"],
            dtype=_dtype(config, where),
            sliding_window=_sliding_window(config),
            nemo=nemo
            | CONSTANT
            | {
                "kv_channels": sizes.head_width,
                "qkv_bias": family.qkv_bias,
                "qk_layernorm": family.qk_layernorm,
            }
            | _rope(config, where),
        )


def _parse(text: bytes, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: is not JSON ({error}); give the model's own config.json") from error
    if not isinstance(config, dict):
        raise UserError(f"{where}: is no JSON object; give the model's own config.json")
    return config


def _family(config: dict[str, Any], where: str) -> Family:
    architectures = config.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UserError(
        f"{where}: architectures={json.dumps(architectures)}: unknown (known are {', '.join(FAMILIES)})"
    )


def _value(config: dict[str, Any], key: str, where: str) -> Any:
    if key == "tie_word_embeddings":
        return bool(config.get(key, False))
    value = config.get(key)
    if value is None and key == "num_key_value_heads":
        value = config.get("num_attention_heads")
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(
            f"{where}: {key}={json.dumps(value)}: must be a positive number (restore the model's own file)"
        )
    return value


def _sizes(config: dict[str, Any], nemo: dict[str, Any], where: str) -> Sizes:
    heads, groups, hidden = nemo["num_attention_heads"], nemo["num_query_groups"], nemo["hidden_size"]
    if heads % groups:
        raise UserError(
            f"{where}: num_key_value_heads={groups}: must divide num_attention_heads={heads} (restore the "
            "model's own file)"
        )
    return Sizes(
        layers=nemo["num_layers"],
        hidden=hidden,
        ffn=nemo["ffn_hidden_size"],
        heads=heads,
        groups=groups,
        head_width=config.get("head_dim") or hidden // heads,
        vocabulary=_value(config, "vocab_size", where),
    )


def _dtype(config: dict[str, Any], where: str) -> str:
    dtype = config.get("torch_dtype") or config.get("dtype") or "float32"
    if dtype not in DTYPES:
        raise UserError(f"{where}: torch_dtype={json.dumps(dtype)}: is none of {', '.join(DTYPES)}")
    return dtype


def _sliding_window(config: dict[str, Any]) -> int | None:
    """Qwen's switch for it may be off beside a width."""
    return config.get("sliding_window") if config.get("use_sliding_window", True) else None


def _rope(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Base and scaling of the rotary embedding; transformers 5 writes both as `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = {"rotary_base": _value(rope if "rope_theta" in rope else config, "rope_theta", where)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base
    if kind != "llama3":
        raise UserError(
            f"{where}: rope_scaling: the type {json.dumps(kind)} is not supported, llama3 is (remove "
            "rope_scaling to train within the original length)"
        )
    scaling = {ours: _value(rope, theirs, where) for ours, theirs in ROPE_SCALING_FIELDS.items()}
    return base | {"scale_positional_embedding": True} | scaling
