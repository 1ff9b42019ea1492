"""The kept list of weights: names in NeMo and on Hugging Face, shapes, and how one becomes the other.

NeMo's names are those of Megatron-core's Transformer Engine layers, under which the plain layers save, too. A
checkpoint holds the weights of all layers as one tensor with the layer in front.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tepo_nemo.conversion.families import Architecture, Sizes

Shape = tuple[int, ...]

PADDED_TO = 128
"""The embedding is filled up to a multiple of this many rows: any tensor-parallel size of 2^n divides it."""


@dataclass(frozen=True)
class Weight:
    """A weight of NeMo, below `model.`; with `layers.` in its name there is one in every layer."""

    nemo: str
    made: Literal["of one", "of halves", "by group", "of the vocabulary"]
    parts: Mapping[str, tuple[str, ...]]  # names on Hugging Face -> shape, in the words of `Sizes`
    needs: Literal["nothing", "qkv_bias", "qk_layernorm", "untied"] = "nothing"

    @property
    def in_layers(self) -> bool:
        return ".layers." in self.nemo

    def names(self, layer: int) -> list[str]:
        """On Hugging Face; `layer` counts from 0."""
        return [part.format(layer) for part in self.parts]

    def part_shapes(self, sizes: Sizes) -> list[Shape]:
        """Of the weights on Hugging Face."""
        return [tuple(getattr(sizes, size) for size in shape) for shape in self.parts.values()]

    def shape(self, sizes: Sizes) -> Shape:
        """In NeMo, of one layer."""
        first, *others = self.part_shapes(sizes)
        rows = first[0] + sum(other[0] for other in others)
        return (padded(rows) if self.made == "of the vocabulary" else rows, *first[1:])


_LAYER = "model.layers.{}."
_ATTENTION = "decoder.layers.self_attention."

WEIGHTS = (
    Weight(
        "embedding.word_embeddings.weight",
        "of the vocabulary",
        {"model.embed_tokens.weight": ("vocabulary", "hidden")},
    ),
    Weight(
        _ATTENTION + "linear_qkv.layer_norm_weight",
        "of one",
        {_LAYER + "input_layernorm.weight": ("hidden",)},
    ),
    Weight(
        _ATTENTION + "linear_qkv.weight",
        "by group",
        {
            _LAYER + "self_attn.q_proj.weight": ("queries", "hidden"),
            _LAYER + "self_attn.k_proj.weight": ("keys", "hidden"),
            _LAYER + "self_attn.v_proj.weight": ("keys", "hidden"),
        },
    ),
    Weight(
        _ATTENTION + "linear_qkv.bias",
        "by group",
        {
            _LAYER + "self_attn.q_proj.bias": ("queries",),
            _LAYER + "self_attn.k_proj.bias": ("keys",),
            _LAYER + "self_attn.v_proj.bias": ("keys",),
        },
        needs="qkv_bias",
    ),
    Weight(
        _ATTENTION + "q_layernorm.weight",
        "of one",
        {_LAYER + "self_attn.q_norm.weight": ("head_width",)},
        needs="qk_layernorm",
    ),
    Weight(
        _ATTENTION + "k_layernorm.weight",
        "of one",
        {_LAYER + "self_attn.k_norm.weight": ("head_width",)},
        needs="qk_layernorm",
    ),
    Weight(
        _ATTENTION + "linear_proj.weight",
        "of one",
        {_LAYER + "self_attn.o_proj.weight": ("hidden", "queries")},
    ),
    Weight(
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "of one",
        {_LAYER + "post_attention_layernorm.weight": ("hidden",)},
    ),
    Weight(
        "decoder.layers.mlp.linear_fc1.weight",
        "of halves",
        {
            _LAYER + "mlp.gate_proj.weight": ("ffn", "hidden"),
            _LAYER + "mlp.up_proj.weight": ("ffn", "hidden"),
        },
    ),
    Weight(
        "decoder.layers.mlp.linear_fc2.weight",
        "of one",
        {_LAYER + "mlp.down_proj.weight": ("hidden", "ffn")},
    ),
    Weight("decoder.final_layernorm.weight", "of one", {"model.norm.weight": ("hidden",)}),
    Weight(
        "output_layer.weight",
        "of the vocabulary",
        {"lm_head.weight": ("vocabulary", "hidden")},
        needs="untied",
    ),
)

# Modules that ask a checkpoint for an `_extra_state` under some version of Transformer Engine or in plain
# Megatron-core. It holds scales of fp8 and is empty without: one that nobody asks for does no harm, one that
# is missing fails the load.
EXTRA_STATES = {
    **dict.fromkeys(
        (
            _ATTENTION + "linear_qkv",
            _ATTENTION + "core_attention",
            _ATTENTION + "linear_proj",
            "decoder.layers.mlp.linear_fc1",
            "decoder.layers.mlp.linear_fc2",
            "decoder.final_layernorm",
        ),
        "nothing",
    ),
    _ATTENTION + "q_layernorm": "qk_layernorm",
    _ATTENTION + "k_layernorm": "qk_layernorm",
}


def weights_of(architecture: Architecture) -> list[Weight]:
    """Those that the model has, in the order of its layers' own list."""
    return [weight for weight in WEIGHTS if _has(architecture, weight.needs)]


def extra_state_keys(architecture: Architecture) -> list[str]:
    """Keys of Megatron-core's sharded objects: one of each layer's, whatever the layout."""
    layers = architecture.sizes.layers
    keys = []
    for module, needs in EXTRA_STATES.items():
        if not _has(architecture, needs):
            continue
        shards = [(layer, layers) for layer in range(layers)] if ".layers." in module else [(0, 1)]
        keys += [f"{module}._extra_state/shard_{place}_{count}" for place, count in shards]
    return keys


def huggingface_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Every tensor that the model has on Hugging Face, in the order of the model."""
    sizes, shapes = architecture.sizes, {}
    for weight, layer in in_order(architecture):
        shapes |= zip(weight.names(layer), weight.part_shapes(sizes), strict=True)
    return shapes


def total_bytes(architecture: Architecture) -> int:
    """Of all weights on Hugging Face."""
    width = getattr(torch, architecture.dtype).itemsize
    return width * sum(math.prod(shape) for shape in huggingface_shapes(architecture).values())


def in_order(architecture: Architecture) -> Iterator[tuple[Weight, int]]:
    """All weights from the embedding to the output layer, layer by layer from 0, as files hold them."""
    weights = weights_of(architecture)
    layered = [weight for weight in weights if weight.in_layers]
    first = weights.index(layered[0])
    yield from ((weight, 0) for weight in weights[:first])
    for layer in range(architecture.sizes.layers):
        yield from ((weight, layer) for weight in layered)
    yield from ((weight, 0) for weight in weights[first + len(layered) :])


def _has(architecture: Architecture, needs: str) -> bool:
    return {
        "nothing": True,
        "qkv_bias": architecture.family.qkv_bias,
        "qk_layernorm": architecture.family.qk_layernorm,
        "untied": not architecture.tied,
    }[needs]


def padded(vocabulary: int) -> int:
    """Rows of NeMo's embedding."""
    return -(-vocabulary // PADDED_TO) * PADDED_TO


def join_groups(query: Tensor, key: Tensor, value: Tensor, sizes: Sizes) -> Tensor:
    """Megatron's [qkv, ...]: group by group the rows of its query heads, of its key and of its value."""
    rest = query.shape[1:]
    parts = [part.reshape(sizes.groups, -1, *rest) for part in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(sizes.qkv, *rest)


def split_groups(qkv: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `join_groups`."""
    rest = qkv.shape[1:]
    rows = [sizes.queries // sizes.groups, sizes.head_width, sizes.head_width]
    parts = qkv.reshape(sizes.groups, -1, *rest).split(rows, dim=1)
    return tuple(part.reshape(-1, *rest) for part in parts)
