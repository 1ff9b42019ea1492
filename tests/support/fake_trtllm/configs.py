"""Model configurations of TensorRT-LLM 0.16 and 0.17: keyword-only, leftovers become attributes."""

import logging
from copy import copy
from enum import IntEnum
from typing import Any

LOG = logging.getLogger("fake_trtllm")


class Mapping:
    """Which rank of which layout an engine is."""

    def __init__(self, world_size: int = 1, rank: int = 0, tp_size: int = 1, pp_size: int = 1) -> None:
        assert world_size == tp_size * pp_size and 0 <= rank < world_size
        self.world_size, self.rank, self.tp_size, self.pp_size = world_size, rank, tp_size, pp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size


class MoeConfig:
    """Mixtures of experts: none here."""

    class ExpertScaleNormalizationMode(IntEnum):
        NONE = 0
        RENORMALIZE = 1

    def __init__(self, num_experts: int = 0, top_k: int = 0, normalization_mode: int = 1) -> None:
        assert num_experts == 0, "no mixture of experts in this fake"


class PretrainedConfig:
    """What all models share."""

    def __init__(
        self,
        *,
        architecture: str,
        dtype: str,
        hidden_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        vocab_size: int,
        hidden_act: str,
        norm_epsilon: float,
        position_embedding_type: str,
        max_position_embeddings: int,
        num_key_value_heads: int,
        intermediate_size: int,
        head_size: int,
        logits_dtype: str = "float32",
        use_parallel_embedding: bool = False,
        embedding_sharding_dim: int = 0,
        share_embedding_table: bool = False,
        qk_layernorm: bool = False,
        quantization: dict | None = None,
        mapping: Mapping | None = None,
        **leftovers: Any,
    ) -> None:
        assert dtype in ("float32", "bfloat16", "float16") and logits_dtype == "float32"
        assert isinstance(norm_epsilon, float) and isinstance(max_position_embeddings, int)
        assert hidden_act == "silu" and position_embedding_type == "rope_gpt_neox"
        assert use_parallel_embedding and embedding_sharding_dim == 0
        assert all(value is None for value in (quantization or {}).values())
        for name, value in locals().items():
            if name not in ("self", "leftovers", "quantization", "__class__"):
                setattr(self, name, value)
        # Legacy ways to give the mapping.
        sizes = {name: leftovers.pop(name, 1) for name in ("world_size", "tp_size", "pp_size")}
        leftovers.pop("gpus_per_node", None)
        self.mapping = mapping or Mapping(**sizes)
        for name, value in leftovers.items():
            LOG.warning("Implicitly setting %s.%s = %s", type(self).__name__, name, value)
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        return {**{name: copy(value) for name, value in vars(self).items()}, "mapping": vars(self.mapping)}


class LLaMAConfig(PretrainedConfig):
    def __init__(
        self,
        *,
        mlp_bias: bool = False,
        attn_bias: bool = False,
        rotary_base: float = 10000.0,
        rotary_scaling: dict | None = None,
        moe: MoeConfig | None = None,
        **rest: Any,
    ) -> None:
        self.mlp_bias, self.attn_bias = mlp_bias, attn_bias
        self.rotary_base, self.rotary_scaling = rotary_base, rotary_scaling
        if moe is None:
            MoeConfig(rest.pop("moe_num_experts", 0), rest.pop("moe_top_k", 0))
            rest.pop("moe_normalization_mode", None)
        super().__init__(**rest)


class QWenConfig(LLaMAConfig):
    def __init__(self, *, attn_bias: bool = True, use_logn_attn: bool = False, **rest: Any) -> None:
        self.use_logn_attn = use_logn_attn
        super().__init__(attn_bias=attn_bias, **rest)
        assert self.qwen_type == "qwen2", "its layers read the type, which has no default"


class GPTConfig(PretrainedConfig):
    """Looked up, never built here."""


class GemmaConfig(PretrainedConfig):
    """The same."""


class FalconConfig(PretrainedConfig):
    """The same."""
