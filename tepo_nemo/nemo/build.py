"""Builds the actor and its optimizer with NeMo's and NeMo-Aligner's own set-up helpers."""

from dataclasses import dataclass

import torch
from nemo.collections.nlp.parts.megatron_trainer_builder import MegatronTrainerBuilder
from nemo_aligner.utils.train_script_utils import (
    extract_optimizer_scheduler_from_ptl_model,
    init_distributed,
    init_using_ptl,
)
from nemo_aligner.utils.utils import (
    load_and_override_model_config,
    load_checkpoint_model_config,
    load_from_nemo,
)
from omegaconf import DictConfig
from torch.optim import Optimizer

from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel
from tepo_nemo.nemo.checkpoint import any_vocabulary_padding
from tepo_nemo.nemo.host_config import host_config

# Keys that shape the weights: what the configuration says of them must be what the checkpoint has.
_SHAPES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "activation",
    "bias",
    "qkv_bias",
    "position_embedding_type",
    "share_embeddings_and_output_weights",
)


@dataclass(frozen=True)
class Host:
    """A built model with its optimizer, on this rank."""

    actor: MegatronGPTTEPOActorModel
    optimizer: Optimizer


def build_host(config: Config) -> Host:
    """Build the model (from `model.restore_from_path` or from its configuration alone) and its optimizer.

    Initialises the process groups; called by all ranks.

    Raises:
        UserError: the checkpoint cannot be read, or is of another architecture than the configuration says.
    """
    cfg = host_config(config)
    checkpoint = config.model.restore_from_path
    if checkpoint is not None:
        _check_checkpoint(config)
        # The merge keeps keys of the checkpoint that ours lack; one optimizer's are of no use to another.
        cfg.model.overwrite_base_config = {"optim": True}
        cfg.model = load_and_override_model_config(str(checkpoint), cfg.model)
    trainer = MegatronTrainerBuilder(cfg).create_trainer()
    if checkpoint is not None:
        with any_vocabulary_padding():
            actor = load_from_nemo(
                MegatronGPTTEPOActorModel, cfg.model, trainer, strict=True, restore_path=str(checkpoint)
            )
    else:
        torch.manual_seed(config.seed)
        actor = MegatronGPTTEPOActorModel(cfg.model, trainer)
    init_distributed(trainer, actor, cfg.model.get("transformer_engine", False))
    # Lightning sizes its schedules by a loader; ours has nothing to size.
    examples = list(range(config.layout.data))
    init_using_ptl(trainer, actor, torch.utils.data.DataLoader(examples, batch_size=len(examples)), examples)
    optimizer, _ = extract_optimizer_scheduler_from_ptl_model(actor)
    return Host(actor, optimizer)


def _check_checkpoint(config: Config) -> None:
    path = config.model.restore_from_path
    saved: DictConfig = load_checkpoint_model_config(str(path))
    for key in _SHAPES:
        given = getattr(config.model, key)
        if given is not None and key in saved and saved[key] is not None and given != saved[key]:
            raise UserError(
                f"model.{key}={given}: {path} has {saved[key]}; set model.{key}={saved[key]} or"
                f" model.{key}=null, or give another checkpoint"
            )
