"""The shape of a model, and its parameters: of the whole, and of each rank."""

from dataclasses import dataclass

from tepo_nemo.config.model import ModelConfig
from tepo_nemo.errors import UserError

_NEEDED = (
    "vocab_size", "encoder_seq_length", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "normalization", "activation", "bias", "position_embedding_type", "share_embeddings_and_output_weights",
)  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A GPT model of Megatron-core, and how many ranks share it."""

    vocabulary: int  # true
    padded_vocabulary: int
    sequence: int  # longest
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int  # key-value heads
    head_width: int
    gated: bool  # the feed-forward layer has two halves
    norm_parameters: int  # of a norm, a channel: 1 (a scale) or 2 (and a bias)
    bias: bool
    qkv_bias: bool
    qk_layernorm: bool
    learned_positions: bool
    tied: bool
    tensor: int
    pipeline: int

    @classmethod
    def of(cls, model: ModelConfig) -> "Architecture":
        """Raises UserError where the configuration leaves the architecture to a checkpoint."""
        for key in _NEEDED:
            if getattr(model, key) is None:
                raise UserError(
                    f"model.{key}=null: a plan takes the architecture from the configuration, not from a "
                    f"checkpoint (set model.{key}, or choose a preset of model=)"
                )
        return cls(
            vocabulary=model.vocab_size,
            padded_vocabulary=model.padded_vocab_size,
            sequence=model.encoder_seq_length,
            layers=model.num_layers,
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size,
            heads=model.num_attention_heads,
            groups=model.num_query_groups or model.num_attention_heads,
            head_width=model.kv_channels or model.hidden_size // model.num_attention_heads,
            gated=model.activation.endswith("glu"),
            norm_parameters=1 if model.normalization == "rmsnorm" else 2,
            bias=model.bias,
            qkv_bias=model.bias or bool(model.qkv_bias),
            qk_layernorm=bool(model.qk_layernorm),
            learned_positions=model.position_embedding_type == "learned_absolute",
            tied=model.share_embeddings_and_output_weights,
            tensor=model.tensor_model_parallel_size,
            pipeline=model.pipeline_model_parallel_size,
        )

    @property
    def query_width(self) -> int:
        """Channels of all query heads together."""
        return self.heads * self.head_width

    @property
    def key_value_width(self) -> int:
        """Channels of all keys, or of all values."""
        return self.groups * self.head_width

    @property
    def fc1_width(self) -> int:
        """Outputs of the first matrix of the feed-forward layer."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def layers_per_stage(self) -> int:
        return self.layers // self.pipeline

    @property
    def parameters(self) -> int:
        """Of the whole model, each counted once, without the rows that pad the vocabulary."""
        layers = self.layers * self._layer(tensor=1)
        ends = self._positions() + self._norm() + self._table(self.vocabulary) * (1 if self.tied else 2)
        return layers + ends

    def parameters_of_rank(self, stage: int) -> int:
        """Of one rank of a pipeline stage, counted from 0."""
        count = self.layers_per_stage * self._layer(self.tensor)
        table = self._table(self.padded_vocabulary // self.tensor)
        first, last = stage == 0, stage == self.pipeline - 1
        if first:
            count += table + self._positions()
        if last:
            count += self._norm()
            if not (self.tied and first):  # a tied one lies on the first stage, and once more on the last
                count += table
        return count

    @property
    def matrix_parameters(self) -> int:
        """Of the products that every token goes through; the output layer is not among them."""
        attention = self.hidden * (2 * self.query_width + 2 * self.key_value_width)
        return self.layers * (attention + self.hidden * (self.fc1_width + self.ffn))

    def _layer(self, tensor: int) -> int:
        """Of a layer, on one of `tensor` ranks. Norms and the biases of sums are on all of them."""
        mixed = self.query_width + 2 * self.key_value_width
        shared = self.hidden * (mixed + self.query_width + self.fc1_width + self.ffn)
        shared += mixed * self.qkv_bias + self.fc1_width * self.bias
        whole = 2 * self._norm() + 2 * self.hidden * self.bias
        if self.qk_layernorm:
            whole += 2 * self.norm_parameters * self.head_width
        return shared // tensor + whole

    def _norm(self) -> int:
        return self.norm_parameters * self.hidden

    def _table(self, rows: int) -> int:
        return rows * self.hidden

    def _positions(self) -> int:
        return self.sequence * self.hidden if self.learned_positions else 0
