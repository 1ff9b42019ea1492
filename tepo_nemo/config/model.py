"""The `model` section: the keys of NeMo's GPT models under their own names."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tepo_nemo.config.base import Count, LocalPath, Section
from tepo_nemo.config.model_keys import check_model_keys


def _hub_name_or_folder(name: str) -> str:
    """NAME and OWNER/NAME are names on the hub; all else is a folder, and made absolute."""
    on_hub = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)
    return name if on_hub else str(Path(name).expanduser().absolute())


class TokenizerConfig(Section):
    """Which tokenizer NeMo loads."""

    library: Literal["huggingface"] = "huggingface"
    """Where the tokenizer comes from."""
    type: Annotated[str, AfterValidator(_hub_name_or_folder)]
    """A folder (written with `/` or `./` in front), or a name on the Hugging Face hub."""


def _precision(value: object) -> object:
    if value in (16, "16", "fp16", "16-mixed"):
        raise ValueError(
            "16-bit floats are not supported, their range needs a loss scale (set model.precision=bf16)"
        )
    return str(value) if value in (32, "32") and not isinstance(value, bool) else value


def _no_dropout(value: object) -> object:
    if value != 0:
        raise ValueError("must be 0, since with dropout no log-probability can be computed twice")
    return float(value)


Activation = Literal[
    "gelu", "geglu", "reglu", "swiglu", "squared-relu", "fast-geglu", "fast-swiglu", "fast-reglu",
    "approx-gelu",
]  # fmt: skip
NoDropout = Annotated[float, BeforeValidator(_no_dropout)]


class ModelConfig(Section, extra="allow"):
    """Further keys: `model_keys.PASSED_ON` go to NeMo as they are; others must stand under `extra`."""

    name: str
    """What the model is called in logs and reports."""
    restore_from_path: LocalPath | None = None
    """The `.nemo` file or folder to start from; null starts from random weights."""
    tokenizer: TokenizerConfig | None = None
    """null takes the tokenizer of the checkpoint."""
    vocab_size: Count | None = None
    """The true vocabulary, without the columns that Megatron pads."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: Count = 1
    """Stages that share the layers."""
    sequence_parallel: bool = False
    """Shard activations between the tensor-parallel regions along the sequence."""
    precision: Annotated[Literal["32", "bf16"], BeforeValidator(_precision)] = "bf16"
    """Of the forward and backward pass."""
    megatron_amp_O2: bool = False
    """bf16 weights with fp32 main copies in the optimizer; needs precision bf16."""
    activations_checkpoint_granularity: Literal["full", "selective"] | None = None
    """What the backward pass recomputes instead of keeping it."""
    hidden_dropout: NoDropout = 0.0
    """Must be 0."""
    attention_dropout: NoDropout = 0.0
    """Must be 0."""
    ffn_dropout: NoDropout = 0.0
    """Must be 0."""

    # The architecture: null where a checkpoint is given and its value is taken.
    encoder_seq_length: Count | None = None
    """Longest sequence, prompt and response together."""
    max_position_embeddings: Count | None = None
    """Longest sequence that the model was made for."""
    make_vocab_size_divisible_by: Count | None = None
    """The embedding is padded to a multiple of this x tensor_model_parallel_size; null is NeMo's 128."""
    num_layers: Count | None = None
    """Transformer layers."""
    hidden_size: Count | None = None
    """Width of the residual stream."""
    ffn_hidden_size: Count | None = None
    """Width of the feed-forward layer (of each half, with a gated activation)."""
    num_attention_heads: Count | None = None
    """Query heads."""
    num_query_groups: Count | None = None
    """Key-value heads; null is one a query head."""
    kv_channels: Count | None = None
    """Width of a head; null is hidden_size / num_attention_heads."""
    normalization: Literal["layernorm", "layernorm1p", "rmsnorm"] | None = None
    """Kind of the normalization layers."""
    activation: Activation | None = None
    """Of the feed-forward layer; fast- is the same function in one matrix product."""
    bias: bool | None = None
    """Biases in the linear layers."""
    qkv_bias: bool | None = None
    """Biases in the query, key and value projections alone."""
    qk_layernorm: bool | None = None
    """Normalize queries and keys, head by head."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] | None = None
    """Kind of the position embedding."""
    rotary_base: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary embedding's wavelengths; null is NeMo's 10000."""
    rotary_percentage: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a head that is rotated; null is all of it."""
    share_embeddings_and_output_weights: bool | None = None
    """Tie the output layer to the embedding."""

    extra: dict[str, Any] = Field(default_factory=dict)
    """Keys that go to NeMo unchecked."""

    @property
    def padded_vocab_size(self) -> int | None:
        """Rows of the embedding, equally many on every tensor-parallel rank; None where it is unknown."""
        if self.vocab_size is None:
            return None
        multiple = (self.make_vocab_size_divisible_by or 128) * self.tensor_model_parallel_size
        return math.ceil(self.vocab_size / multiple) * multiple

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            check_model_keys(values, typed=cls.model_fields)
        return values
