"""Memory of a GPU, part by part.

Weights, gradients and optimizer state are counted to the byte, but for the padding of Megatron's buffers.
What a forward and backward pass keeps is an estimate from the layers of Transformer Engine, whose attention
holds no scores; it has been measured on no GPU.
"""

from dataclasses import dataclass, replace

from tepo_nemo.config.schema import Config
from tepo_nemo.planning.architecture import Architecture

GIB = 2**30
RESERVED = 5 * GIB
"""For CUDA and NCCL, the workspaces of matrix products, and what is lost between blocks of memory."""

_BLOCK_LOGITS = 2**26  # of the fused output layer on a GPU, see tepo_nemo/parallel/output_layer.py
_SAMPLING = 40  # bytes a logit: hashes of 64 bits and their intermediates


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU of a pipeline stage. Updates and rollouts take turns."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    output_layer: int
    engine: int  # weights of a rollout engine of its own
    key_values: int
    sampling: int
    engine_stays: bool  # while updating, too

    @property
    def resident(self) -> int:
        """There all the time."""
        return self.weights + self.gradients + self.optimizer

    @property
    def update(self) -> int:
        kept = self.engine + self.key_values if self.engine_stays else 0
        return self.resident + self.activations + self.output_layer + kept

    @property
    def rollout(self) -> int:
        return self.resident + self.engine + self.key_values + self.sampling

    @property
    def peak(self) -> int:
        """Of what is counted; `RESERVED` comes on top."""
        return max(self.update, self.rollout)


def memory_of(config: Config, shape: Architecture, stage: int) -> Memory:
    """Of a GPU of that stage, when sequences are as long as they may be."""
    parameters = shape.parameters_of_rank(stage)
    rows = generation_rows(config) if generates_here(config) else 0
    shared = config.trainer.optimizer.name == "distributed_adam"
    return Memory(
        weights=parameters * weight_bytes(config),
        gradients=parameters * 4,
        optimizer=parameters * optimizer_bytes(config) // (config.layout.data if shared else 1),
        activations=_activations(config, shape, stage, parameters),
        output_layer=_output_layer(config, shape, stage),
        engine=rollout_shape(config, shape).parameters_of_rank(0) * 2 if has_engine(config) else 0,
        key_values=rows * key_value_bytes(config, shape) * shape.sequence,
        sampling=rows * sampling_bytes(config, shape, stage),
        engine_stays=has_engine(config) and not config.rollout.trtllm.unload,
    )


def generates_here(config: Config) -> bool:
    """Whether rollouts take memory and time of the GPUs that train; servers have their own."""
    return config.rollout.backend != "server"


def has_engine(config: Config) -> bool:
    """Whether rollouts come from an engine on the same GPUs that has weights of its own."""
    return config.rollout.backend == "trtllm"


def rollout_shape(config: Config, shape: Architecture) -> Architecture:
    """How the model is shared out while it generates: TensorRT-LLM's engines have all layers on each rank."""
    return replace(shape, pipeline=1) if has_engine(config) else shape


def weight_bytes(config: Config) -> int:
    """Of a parameter."""
    return 2 if config.model.megatron_amp_O2 else 4


def optimizer_bytes(config: Config) -> int:
    """Of the optimizer's state for a parameter: two moments, and a main copy of a bf16 weight."""
    if config.trainer.optimizer.name == "sgd":
        return 0
    return 12 if config.model.megatron_amp_O2 else 8


def micro_batch_tokens(config: Config, shape: Architecture) -> int:
    """Tokens of the largest micro-batch, padding included."""
    trainer, layout = config.trainer, config.layout
    responses = -(-layout.responses_per_update // layout.data)
    if trainer.micro_batch_size is not None:
        responses = min(responses, trainer.micro_batch_size)
    tokens = responses * shape.sequence
    if trainer.micro_batch_tokens is not None:  # a longer response stands alone
        tokens = min(tokens, max(trainer.micro_batch_tokens, shape.sequence))
    return tokens


def generating_copies(config: Config) -> int:
    """Copies of the model, or engines, that answer different prompts at the same time."""
    return config.layout.data * (config.layout.pipeline if has_engine(config) else 1)


def generation_rows(config: Config) -> int:
    """Sequences that a copy of the model, or an engine, generates at once in a step."""
    share = -(-config.layout.responses_per_step // generating_copies(config))
    return share if config.rollout.batch_size is None else min(share, config.rollout.batch_size)


def key_value_bytes(config: Config, shape: Architecture) -> int:
    """Of a token in the cache of a rank."""
    layers = rollout_shape(config, shape).layers_per_stage
    return layers * 2 * shape.key_value_width // shape.tensor * _compute_bytes(config)


def sampling_bytes(config: Config, shape: Architecture, stage: int) -> int:
    """Of a sequence, where its next token is drawn by us: on the last stage."""
    if has_engine(config):
        return 0
    return shape.padded_vocabulary // shape.tensor * _SAMPLING if stage == shape.pipeline - 1 else 0


def _compute_bytes(config: Config) -> int:
    """Of a number in matrix products and in attention."""
    return 4 if config.model.precision == "32" else 2


def _activations(config: Config, shape: Architecture, stage: int, parameters: int) -> int:
    """What the backward pass of a stage needs of the micro-batches that are under way.

    A token takes, of each layer: both norms' inputs and outputs, and two masks of a byte a channel, which
    dropout makes even at 0; queries, keys and values before the rotation, queries and keys after it, and the
    output of attention; what goes into the activation and what comes out. Tensor parallelism divides all but
    the first, and sequence parallelism those too.
    """
    number = _compute_bytes(config)
    residual = 2 if config.model.megatron_amp_O2 else 4
    split = shape.tensor if config.model.sequence_parallel else 1
    heads = 3 * shape.query_width + 3 * shape.key_value_width
    whole = (2 * residual + 2 * number + 2) * shape.hidden // split
    whole += number * (heads + shape.fc1_width + shape.ffn) // shape.tensor
    kept = shape.layers_per_stage * whole
    if config.model.activations_checkpoint_granularity == "full":
        under_way = shape.layers_per_stage * residual * shape.hidden // split
        one_layer = whole
    else:
        under_way, one_layer = kept, 0
    tokens = micro_batch_tokens(config, shape)
    # One forward, one backward: so many micro-batches is a stage ahead of the end of the pipeline.
    batches = shape.pipeline - stage
    # Under autocast each bf16 copy of a weight lives as long as the pass.
    copies = 2 * parameters if config.model.precision == "bf16" and not config.model.megatron_amp_O2 else 0
    return tokens * (batches * under_way + one_layer) + copies


def _output_layer(config: Config, shape: Architecture, stage: int) -> int:
    """Of the last stage: hidden states of all response tokens with their gradient, and logits or a block."""
    if stage < shape.pipeline - 1:
        return 0
    tokens, number = micro_batch_tokens(config, shape), _compute_bytes(config)
    rows = shape.padded_vocabulary // shape.tensor
    hidden = tokens * shape.hidden * (3 * number + 4 + 4)
    if not config.trainer.fused_output_layer:
        return hidden + tokens * rows * number + _BLOCK_LOGITS * 8
    return hidden + rows * shape.hidden * number + min(_BLOCK_LOGITS, tokens * rows) * (number + 8)
