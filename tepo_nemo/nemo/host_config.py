"""From our configuration to the one that Lightning and NeMo read.

`trainer.*` is ours; everything that NeMo wants to have said twice is derived here.
"""

from omegaconf import DictConfig, OmegaConf

from tepo_nemo.config.schema import Config

# All that differs is said for both: a key that a checkpoint has and this configuration lacks would stay.
_ON_CPU = {
    "use_cpu_initialization": True,
    "transformer_engine": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_add_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}
# NeMo's own defaults, but for Transformer Engine, which it leaves off.
_ON_GPU = {
    "use_cpu_initialization": False,
    "transformer_engine": True,
    "masked_softmax_fusion": True,
    "bias_activation_fusion": True,
    "bias_dropout_add_fusion": True,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}

_OPTIMIZERS = {"adam": "fused_adam", "sgd": "sgd", "distributed_adam": "mcore_distributed_optim"}


def host_config(config: Config) -> DictConfig:
    """The `trainer` and `model` sections of a NeMo-Aligner configuration."""
    precision = 32 if config.model.precision == "32" else "bf16"
    return OmegaConf.create(
        {
            "trainer": {
                "num_nodes": config.hardware.nodes,
                "devices": config.hardware.devices_per_node,
                "accelerator": config.hardware.accelerator,
                "precision": precision,
                # The loop, its logs and its checkpoints are ours.
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "use_distributed_sampler": False,
                "max_epochs": 1,
                "max_steps": config.trainer.max_steps * config.trainer.updates_per_rollout,
                "gradient_clip_val": config.trainer.optimizer.gradient_clip,
            },
            # No exp_manager; only this key of it is read, and its default wants a network-sized model.
            "exp_manager": {"log_tflops_per_sec_per_gpu": False},
            "model": _model_section(config, precision),
        }
    )


def _model_section(config: Config, precision: int | str) -> dict:
    given = config.model.model_dump(
        mode="json", exclude={"name", "restore_from_path", "vocab_size", "extra", "tokenizer"}
    )
    section = {key: value for key, value in given.items() if value is not None}
    tokenizer = config.model.tokenizer
    if tokenizer is not None:
        section["tokenizer"] = {
            "library": tokenizer.library,
            "type": str(tokenizer.type),
            "use_fast": True,
            "model": None,
            "vocab_file": None,
            "merge_file": None,
        }
    if config.model.vocab_size is not None:
        section["override_vocab_size"] = config.model.padded_vocab_size
    section |= {
        "name": "",  # no spec of layers but what transformer_engine says
        "mcore_gpt": True,
        "precision": precision,
        "seed": config.seed,
        # Micro-batches are shared out by the trainer; these only have to fit each other.
        "micro_batch_size": 1,
        "global_batch_size": config.layout.data,
        "gradient_as_bucket_view": True,
        "virtual_pipeline_model_parallel_size": None,
        "data": {},
        "optim": _optimizer_section(config),
        # NeMo reads these even where nothing is recomputed.
        "activations_checkpoint_granularity": config.model.activations_checkpoint_granularity,
        "activations_checkpoint_method": "uniform"
        if config.model.activations_checkpoint_granularity == "full"
        else None,
        "activations_checkpoint_num_layers": 1
        if config.model.activations_checkpoint_granularity == "full"
        else None,
        "activations_checkpoint_layers_per_pipeline": None,
        "num_micro_batches_with_partial_activation_checkpoints": None,
    }
    if config.hardware.accelerator == "cpu":
        section |= _ON_CPU  # the fused kernels and Transformer Engine exist on GPUs alone
    else:
        section = _ON_GPU | section
    return section | config.model.extra


def _optimizer_section(config: Config) -> dict:
    optimizer = config.trainer.optimizer
    section = {
        "name": _OPTIMIZERS[optimizer.name],
        "lr": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
    }
    if optimizer.name != "sgd":
        section |= {"betas": list(optimizer.betas), "eps": optimizer.eps}
    if optimizer.name == "distributed_adam":
        section |= {"overlap_grad_sync": False, "overlap_param_sync": False}
    return section
