"""What the sections of a configuration must agree on.

Each check raises UserError with one line: the key, its value, the numbers, and what to do.
"""

from difflib import get_close_matches

from tepo_nemo.config.messages import shown
from tepo_nemo.config.model import ModelConfig
from tepo_nemo.config.options import check_options
from tepo_nemo.config.presets import method_keys
from tepo_nemo.config.rollout_checks import check_rollout
from tepo_nemo.config.schema import AlgorithmConfig, Config, DataConfig, OptimizerConfig, TrainerConfig
from tepo_nemo.config.server import check_server
from tepo_nemo.errors import UserError

_NEEDED_WITHOUT_CHECKPOINT = (
    "tokenizer", "vocab_size", "encoder_seq_length", "num_layers", "hidden_size", "ffn_hidden_size",
    "num_attention_heads", "normalization", "activation", "bias", "position_embedding_type",
    "share_embeddings_and_output_weights",
)  # fmt: skip


def check_config(config: Config) -> None:
    """All checks that need neither a heavy import nor a file."""
    _check_method_keys(config.algorithm)
    check_options(config.algorithm.options)
    _check_architecture(config.model)
    _check_tensor_parallel(config.model)
    _check_pipeline(config.model)
    _check_precision(config)
    _check_packing(config)
    _check_optimizer(config.trainer.optimizer)
    _check_lengths(config)
    config.layout  # noqa: B018  raises where ranks or responses do not divide
    _check_placement(config)
    _check_evaluation(config.data)
    _check_keep_best(config)
    check_rollout(config)
    _check_spikes(config)
    check_server(config)


def _check_method_keys(algorithm: AlgorithmConfig) -> None:
    """A shipped method takes exactly the keys of its preset; options.py looks at the values."""
    known = method_keys(algorithm.name)
    if not known:
        return  # a dotted path, or an unknown name: the registry of objectives knows
    given = algorithm.model_dump().keys()
    for key in given - known:
        near = get_close_matches(key, known, n=1)
        hint = f"did you mean algorithm.{near[0]}?" if near else f"it has {', '.join(sorted(known))}"
        raise UserError(f"algorithm.{key}: is no option of {algorithm.name} ({hint})")
    for key in sorted(known - given):
        raise UserError(
            f"algorithm.{key}: is missing (set algorithm.{key}=..., or start from a preset of algorithm=)"
        )


def _check_architecture(model: ModelConfig) -> None:
    if model.restore_from_path is None:
        for key in _NEEDED_WITHOUT_CHECKPOINT:
            if getattr(model, key) is None:
                raise UserError(
                    f"model.{key}: is missing, and there is no checkpoint to take it from "
                    f"(set model.{key} or model.restore_from_path)"
                )
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_query_groups
    if hidden and heads and not model.kv_channels and hidden % heads:
        raise UserError(
            f"model.hidden_size={hidden}: must be a multiple of model.num_attention_heads={heads} "
            "(or set model.kv_channels)"
        )
    if heads and groups and heads % groups:
        raise UserError(f"model.num_query_groups={groups}: must divide model.num_attention_heads={heads}")
    width = model.kv_channels or (hidden // heads if hidden and heads else None)
    if width and model.position_embedding_type == "rope" and width % 2:
        raise UserError(
            f"model.kv_channels={shown(model.kv_channels)}: heads of width {width} cannot be rotated, which "
            "model.position_embedding_type=rope does with channels in pairs (set an even width)"
        )


def _check_tensor_parallel(model: ModelConfig) -> None:
    """The vocabulary needs no check: it is padded to a multiple of the tensor-parallel size."""
    size = model.tensor_model_parallel_size
    if model.sequence_parallel and size == 1:
        raise UserError(
            "model.sequence_parallel=true: has no effect with model.tensor_model_parallel_size=1 "
            "(remove it or set a larger size)"
        )
    if model.sequence_parallel and (model.encoder_seq_length or 0) % size:
        raise UserError(
            f"model.encoder_seq_length={model.encoder_seq_length}: must be a multiple of "
            f"model.tensor_model_parallel_size={size} with model.sequence_parallel=true"
        )
    for key in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
        value = getattr(model, key)
        if value and value % size:
            raise UserError(
                f"model.tensor_model_parallel_size={size}: must divide model.{key}={value} (set a size that "
                "does)"
            )


def _check_pipeline(model: ModelConfig) -> None:
    size, layers = model.pipeline_model_parallel_size, model.num_layers
    if not layers:
        return
    if size > layers:
        raise UserError(
            f"model.pipeline_model_parallel_size={size}: is more stages than model.num_layers={layers} "
            f"(set at most {layers})"
        )
    if layers % size:
        raise UserError(
            f"model.pipeline_model_parallel_size={size}: must divide model.num_layers={layers} (set a size "
            "that does)"
        )


def _check_precision(config: Config) -> None:
    model, optimizer = config.model, config.trainer.optimizer.name
    if model.megatron_amp_O2 and model.precision != "bf16":
        raise UserError(
            f"model.megatron_amp_O2=true: needs 16-bit weights, and model.precision={model.precision} "
            "(set model.precision=bf16 or remove it)"
        )
    if model.megatron_amp_O2 and optimizer != "distributed_adam":
        raise UserError(
            f"trainer.optimizer.name={optimizer}: keeps no fp32 copies of the bf16 weights that "
            "model.megatron_amp_O2=true asks for (set trainer.optimizer.name=distributed_adam)"
        )
    autocast = model.precision == "bf16" and not model.megatron_amp_O2
    if autocast and model.sequence_parallel and config.hardware.accelerator == "cpu":
        raise UserError(
            "model.sequence_parallel=true: Megatron's own layers, which the CPU has, cannot be autocast to "
            "model.precision=bf16 with it (set model.megatron_amp_O2=true and "
            "trainer.optimizer.name=distributed_adam, or model.sequence_parallel=false)"
        )


def _check_packing(config: Config) -> None:
    """Megatron-core's own attention has no form for several sequences in a row."""
    if not config.trainer.sequence_packing:
        return
    without = [
        given
        for given, lacks in (
            ("hardware.accelerator=cpu", config.hardware.accelerator == "cpu"),
            (
                "model.transformer_engine=false",
                not (config.model.model_extra or {}).get("transformer_engine", True),
            ),
        )
        if lacks
    ]
    if without:
        raise UserError(
            "trainer.sequence_packing=true: needs the attention of Transformer Engine, which "
            f"{without[0]} does without (set trainer.sequence_packing=false)"
        )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.name != "sgd":
        return
    for key in ("betas", "eps"):
        value = getattr(optimizer, key)
        if value != OptimizerConfig.model_fields[key].default:
            raise UserError(
                f"trainer.optimizer.{key}={value}: has no effect with trainer.optimizer.name=sgd (remove it)"
            )


def _check_lengths(config: Config) -> None:
    """Prompts are measured later, with the tokenizer; some of the sequence must be left for them."""
    response, sequence = config.rollout.max_response_length, config.model.encoder_seq_length
    if sequence and response >= sequence:
        raise UserError(
            f"rollout.max_response_length={response}: leaves no room for a prompt in "
            f"model.encoder_seq_length={sequence} (shorten the one or lengthen the other)"
        )

    longest = config.model.max_position_embeddings
    if sequence and longest and sequence > longest:
        raise UserError(
            f"model.encoder_seq_length={sequence}: is longer than model.max_position_embeddings={longest}, "
            f"the longest sequence that the model was made for (set at most {longest})"
        )


def _check_placement(config: Config) -> None:
    """How copies of the model lie on nodes, and whether their stages have work."""
    tensor, devices = config.model.tensor_model_parallel_size, config.hardware.devices_per_node
    if config.hardware.nodes > 1 and devices % tensor:
        raise UserError(
            f"model.tensor_model_parallel_size={tensor}: must divide hardware.devices_per_node={devices}, so "
            "that ranks which share a layer are on one node (they exchange activations twice a layer; set a "
            "size that does, and model.pipeline_model_parallel_size for the rest)"
        )
    layout, stages = config.layout, config.model.pipeline_model_parallel_size
    most = layout.responses_per_update // layout.data
    if stages > most:
        raise UserError(
            f"model.pipeline_model_parallel_size={stages}: an update has {layout.responses_per_update} "
            f"responses for {layout.data} copies of the model, at most {most} micro-batches each, so that "
            f"stages would always wait (set at most {most}, or lower trainer.updates_per_rollout)"
        )


def _check_evaluation(data: DataConfig) -> None:
    if data.eval_interval and not data.evaluation:
        raise UserError(
            f"data.eval_interval={data.eval_interval}: there is nothing to evaluate (set data.evaluation)"
        )
    for number, benchmark in enumerate(data.evaluation):
        if benchmark.k and max(benchmark.k) > benchmark.samples:
            raise UserError(
                f"data.evaluation.{number}.k={benchmark.k}: {max(benchmark.k)} is more than the "
                f"{benchmark.samples} samples of {benchmark.name} (set a smaller k, or "
                f"data.evaluation.{number}.samples)"
            )
    names = [benchmark.name for benchmark in data.evaluation]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UserError(
                f"data.evaluation.{number}.name={name}: is taken already (give each benchmark its own name)"
            )


def _check_keep_best(config: Config) -> None:
    """There must be something to choose by, and something to choose among."""
    trainer, interval = config.trainer, config.data.eval_interval
    if not trainer.keep_best:
        return
    if not trainer.save_interval:
        raise UserError(
            f"trainer.keep_best={trainer.keep_best}: has no effect with trainer.save_interval=0 "
            "(set that too)"
        )
    if interval and trainer.save_interval % interval:
        raise UserError(
            f"trainer.save_interval={trainer.save_interval}: must be a multiple of "
            f"data.eval_interval={interval} with trainer.keep_best, which compares evaluations"
        )


def _check_spikes(config: Config) -> None:
    trainer, rewinds = config.trainer, config.trainer.spike_rewinds
    for key in ("spike_window", "spike_rewinds"):
        value = getattr(trainer, key)
        if trainer.spike_factor is None and value != TrainerConfig.model_fields[key].default:
            raise UserError(
                f"trainer.{key}={value}: has no effect with trainer.spike_factor=null (set that too)"
            )
    if rewinds and not trainer.save_interval:
        raise UserError(
            f"trainer.spike_rewinds={rewinds}: has no effect with trainer.save_interval=0, since there is "
            "nothing to go back to (set that too)"
        )
    if rewinds and config.replay is not None:
        raise UserError(
            f"trainer.spike_rewinds={rewinds}: has no effect with replay, which has the same prompts again "
            "(remove it)"
        )
