"""From a model configuration and weights to an engine: TensorRT-LLM's models and its build command."""

import logging
from typing import Any

import torch
from support.fake_trtllm.configs import PretrainedConfig
from support.fake_trtllm.engine import DTYPES, weight_shapes
from support.fake_trtllm.runtime import Engine
from torch import Tensor

LOG = logging.getLogger("fake_trtllm")


class Model:
    """A network with the weights that its configuration expects."""

    architecture: str

    def __init__(self, config: PretrainedConfig) -> None:
        assert config.architecture == self.architecture
        self.config = config
        self.weights: dict[str, Tensor] = {}

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> "Model":
        return cls(config)

    def load(self, weights: dict[str, Tensor]) -> None:
        """What is not expected is dropped with a line in the log; what is missing is not."""
        shapes = weight_shapes(self.config.to_dict())
        missing = shapes.keys() - weights.keys()
        assert not missing, f"Expected but not provided tensors:{missing}"
        if weights.keys() - shapes.keys():
            LOG.warning("Provided but not expected tensors: %s", weights.keys() - shapes.keys())
        for name, shape in shapes.items():
            assert tuple(weights[name].shape) == shape, (name, tuple(weights[name].shape), shape)
            assert weights[name].dtype == DTYPES[self.config.dtype]
            self.weights[name] = weights[name].clone(memory_format=torch.contiguous_format)


class LLaMAForCausalLM(Model):
    architecture = "LlamaForCausalLM"


class QWenForCausalLM(Model):
    architecture = "QWenForCausalLM"


class BuildConfig:
    KEYS = {
        "max_input_len", "max_output_len", "max_batch_size", "max_beam_width", "max_seq_len",
        "max_num_tokens", "opt_num_tokens", "max_prompt_embedding_table_size", "gather_context_logits",
        "gather_generation_logits", "strongly_typed", "builder_opt", "use_refit", "multiple_profiles",
    }  # fmt: skip

    def __init__(self, values: dict[str, Any]) -> None:
        assert values.keys() == self.KEYS
        self.values = values

    @classmethod
    def from_dict(cls, values: dict[str, Any], plugin_config: "PluginConfig") -> "BuildConfig":
        assert isinstance(plugin_config, PluginConfig)
        return cls(values)


class PluginConfig:
    context_fmha = True

    def enable_paged_kv_cache(self, tokens_per_block: int) -> None:
        assert tokens_per_block == 128


def optimize_model(model: Model, use_parallel_embedding: bool, share_embedding_table: bool) -> Model:
    assert use_parallel_embedding and not share_embedding_table, "tied embeddings are not part of this fake"
    return model


def preprocess_weights(weights: dict[str, Tensor], config: PretrainedConfig) -> None:
    """Nothing without quantization."""


def check_max_num_tokens(**limits: Any) -> tuple[int, int]:
    return 8192, limits["max_batch_size"]


def build(model: Model, build_config: BuildConfig) -> Engine:
    config = {"pretrained_config": model.config.to_dict(), "build_config": build_config.values}
    return Engine(config, {name: weight.clone() for name, weight in model.weights.items()})
