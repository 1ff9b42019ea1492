"""The model as NeMo's exporter and TensorRT-LLM are to see it.

NeMo 2.2 knows Llama alone on the path that refits. A model with biases in its query, key and value
projections (Qwen2.5) is exported under the same weight names, but needs the class of TensorRT-LLM that has
them: with Llama's they are dropped in silence. Llama 3.1's scaling of the rotary wavelengths is not handed on
at all.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from omegaconf import DictConfig, OmegaConf

MODEL_TYPE = "llama"  # of NeMo's exporter: its table of weight names


class VocabularySize(NamedTuple):
    """In place of the tokenizer, of which the exporter reads nothing but the size.

    A tokenizer's own size is not that of the vocabulary, and need not be shared out evenly: Qwen2.5's has
    151,665 tokens, and the model 152,064. What Megatron pads beyond that does not reach the engine.
    """

    vocab_size: int


def exported_config(model: MegatronGPTModel) -> DictConfig:
    """What the exporter reads, said explicitly: its own defaults are not those of NeMo's models."""
    layers = model.transformer_config
    cfg = model.cfg
    return OmegaConf.create(
        {
            "precision": cfg.precision,
            "num_layers": layers.num_layers,
            "hidden_size": layers.hidden_size,
            "ffn_hidden_size": layers.ffn_hidden_size,
            "num_attention_heads": layers.num_attention_heads,
            "num_query_groups": layers.num_query_groups,
            "kv_channels": layers.kv_channels,
            "normalization": cfg.normalization,
            "layernorm_epsilon": float(layers.layernorm_epsilon),
            "activation": cfg.activation,
            "bias": layers.add_bias_linear,
            "position_embedding_type": cfg.position_embedding_type,
            # The longest that is generated; the tables of angles are made for so many positions.
            "max_position_embeddings": max(cfg.get("max_position_embeddings") or 0, cfg.encoder_seq_length),
            "rotary_percentage": 1.0,
            "rotary_base": _given(cfg, "rotary_base", 10000),
            "share_embeddings_and_output_weights": False,
        }
    )


def rotary_scaling(cfg: Mapping[str, Any]) -> dict[str, Any] | None:
    """Llama 3.1's, under the names of TensorRT-LLM; None without. The defaults are those of NeMo."""
    if not _given(cfg, "scale_positional_embedding", False):
        return None
    return {
        "type": "llama3",
        "factor": float(_given(cfg, "scale_factor", 8)),
        "low_freq_factor": float(_given(cfg, "low_freq_factor", 1)),
        "high_freq_factor": float(_given(cfg, "high_freq_factor", 4)),
        "original_max_position_embeddings": int(_given(cfg, "old_context_len", 8192)),
    }


def _given(cfg: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    value = cfg.get(key)
    return otherwise if value is None else value


@contextmanager
def engine_class_of(model: MegatronGPTModel) -> Iterator[None]:
    """Let the exporter build the engine that the model needs; it looks its helper up when it builds."""
    from megatron.core.export.trtllm import trtllm_helper

    plain = trtllm_helper.TRTLLMHelper
    biased, scaling = bool(model.transformer_config.add_qkv_bias), rotary_scaling(model.cfg)

    class Helper(plain):
        def _get_trtllm_config(self, *args: Any, **kwargs: Any) -> Any:
            fields = _fields_of(trtllm_helper, self.model_type, super()._get_trtllm_config, args, kwargs)
            fields["rotary_scaling"] = scaling
            return _with_biases(fields) if biased else _plain_llama(fields)

    trtllm_helper.TRTLLMHelper = Helper
    try:
        yield
    finally:
        trtllm_helper.TRTLLMHelper = plain


def _fields_of(helper, model_type, make_config, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The keyword arguments from which the helper makes a configuration, instead of what it makes."""
    classes = helper.TRT_MODEL_CONFIG
    own = classes[model_type]
    classes[model_type] = dict
    try:
        return make_config(*args, **kwargs)
    finally:
        classes[model_type] = own


def _plain_llama(fields: dict[str, Any]) -> Any:
    from tensorrt_llm.models.llama.config import LLaMAConfig

    return LLaMAConfig(**fields)


def _with_biases(fields: dict[str, Any]) -> Any:
    """Qwen2.5. The class is looked up by its architecture, for which only this spelling works."""
    import inspect

    from tensorrt_llm.models.qwen.config import QWenConfig

    own = {
        "architecture": "QWenForCausalLM",
        "qwen_type": "qwen2",
        "attn_bias": True,
        "mlp_bias": False,
        "seq_length": fields["max_position_embeddings"],  # read for its LogN attention alone
    }
    if "use_logn_attn" in inspect.signature(QWenConfig).parameters:
        own["use_logn_attn"] = False
    experts = ("moe_num_experts", "moe_top_k", "moe_normalization_mode", "moe_tp_mode")
    return QWenConfig(**{name: value for name, value in fields.items() if name not in experts} | own)
