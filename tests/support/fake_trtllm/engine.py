"""A Llama in plain torch under the weight names and in the layouts of TensorRT-LLM, tensor-parallel.

Written from the papers and from TensorRT-LLM's layer definitions; nothing is shared with Megatron's forward.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.fake_trtllm.faults import Faults
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Constants of the network that no one refits; TensorRT lists them among the refittable weights.
TABLES = ("rotary_inv_freq", "embed_positions_for_gpt_attention")


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one tensor-parallel rank's weights."""
    ranks = config["mapping"]["tp_size"]
    hidden, width, size = config["hidden_size"], config["intermediate_size"] // ranks, config["head_size"]
    heads, groups = config["num_attention_heads"] // ranks, config["num_key_value_heads"] // ranks
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.vocab_embedding.weight": (config["vocab_size"] // ranks, hidden),
        "transformer.ln_f.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"] // ranks, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        own = f"transformer.layers.{layer}."
        shapes[f"{own}input_layernorm.weight"] = (hidden,)
        shapes[f"{own}attention.qkv.weight"] = ((heads + 2 * groups) * size, hidden)
        if config["attn_bias"]:
            shapes[f"{own}attention.qkv.bias"] = ((heads + 2 * groups) * size,)
        shapes[f"{own}attention.dense.weight"] = (hidden, heads * size)
        shapes[f"{own}post_layernorm.weight"] = (hidden,)
        shapes[f"{own}mlp.fc.weight"] = shapes[f"{own}mlp.gate.weight"] = (width, hidden)
        shapes[f"{own}mlp.proj.weight"] = (hidden, width)
    return shapes


class Network:
    """The forward of one rank.

    Args:
        config: `PretrainedConfig.to_dict()`.
        weights: by name; read at each forward.
        group: of the ranks that share the engine.
    """

    def __init__(
        self, config: dict[str, Any], weights: dict[str, Tensor], group: dist.ProcessGroup, faults: Faults
    ) -> None:
        self._config, self._weights, self._group, self._faults = config, weights, group, faults
        self._ranks, self._rank = config["mapping"]["tp_size"], config["mapping"]["rank"]
        self._dtype = DTYPES[config["dtype"]]

    def logits(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """fp32 [B, V] after the last token of each row of `tokens` [B, L], which is padded on the right."""
        hidden = self._embed(tokens)
        for layer in range(self._config["num_hidden_layers"]):
            own = f"transformer.layers.{layer}."
            hidden = hidden + self._attention(own, self._norm(f"{own}input_layernorm.weight", hidden))
            hidden = hidden + self._mlp(own, self._norm(f"{own}post_layernorm.weight", hidden))
        last = hidden[torch.arange(len(tokens)), lengths - 1]
        local = F.linear(self._norm("transformer.ln_f.weight", last), self._weights["lm_head.weight"]).float()
        shards = [torch.empty_like(local) for _ in range(self._ranks)]
        dist.all_gather(shards, local, group=self._group)
        return torch.cat(shards, dim=-1)

    def _embed(self, tokens: Tensor) -> Tensor:
        table = self._weights["transformer.vocab_embedding.weight"]
        local = tokens - self._rank * len(table)
        here = (local >= 0) & (local < len(table))
        return self._sum(table[local.clamp(0, len(table) - 1)] * here[..., None])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * (wide.square().mean(-1, keepdim=True) + self._config["norm_epsilon"]).rsqrt()
        return wide.to(self._dtype) * self._weights[name]

    def _attention(self, own: str, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        size = self._config["head_size"]
        heads = self._config["num_attention_heads"] // self._ranks
        groups = self._config["num_key_value_heads"] // self._ranks
        qkv = F.linear(
            x, self._weights[f"{own}attention.qkv.weight"], self._weights.get(f"{own}attention.qkv.bias")
        )
        parts = qkv.view(rows, length, -1, size).transpose(1, 2).split([heads, groups, groups], dim=1)
        query, key, value = self._rotate(parts[0]), self._rotate(parts[1]), parts[2]
        key, value = (part.repeat_interleave(heads // groups, dim=1) for part in (key, value))
        scores = (query @ key.transpose(-1, -2)).float() / math.sqrt(size)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1).to(self._dtype) @ value
        mixed = mixed.transpose(1, 2).reshape(rows, length, heads * size)
        return self._sum(F.linear(mixed, self._weights[f"{own}attention.dense.weight"]))

    def _mlp(self, own: str, x: Tensor) -> Tensor:
        inner = F.silu(F.linear(x, self._weights[f"{own}mlp.fc.weight"]))
        inner = inner * F.linear(x, self._weights[f"{own}mlp.gate.weight"])
        return self._sum(F.linear(inner, self._weights[f"{own}mlp.proj.weight"]))

    def _rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * self._frequencies()
        cos, sin = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(self._dtype)

    def _frequencies(self) -> Tensor:
        size = self._config["head_size"]
        assert self._config["rotary_pct"] == 1.0
        own = self._config["rotary_base"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        scaling = self._config["rotary_scaling"]
        if scaling is None or self._faults.ignores_rope_scaling:
            return own
        assert scaling["type"] == "llama3", scaling
        return torch.tensor([_llama3(float(frequency), scaling) for frequency in own], dtype=torch.float64)

    def _sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x


def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequency
    context, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency
