"""Builds the actor and its optimizer with NeMo's and NeMo-Aligner's own set-up helpers."""

from dataclasses import dataclass

import torch
from nemo.collections.nlp.parts.megatron_trainer_builder import MegatronTrainerBuilder
from nemo_aligner.utils.train_script_utils import (
    extract_optimizer_scheduler_from_ptl_model,
    init_distributed,
    init_using_ptl,
)
from nemo_aligner.utils.utils import load_and_override_model_config, load_from_nemo
from torch.optim import Optimizer

from tepo_nemo.config.schema import Config
from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel
from tepo_nemo.nemo.host_config import host_config


@dataclass(frozen=True)
class Host:
    """A built model with its optimizer, on this rank."""

    actor: MegatronGPTTEPOActorModel
    optimizer: Optimizer


def build_host(config: Config) -> Host:
    """Build the model (from `model.restore_from_path` or from its configuration alone) and its optimizer.

    Initialises the process groups; called by all ranks.
    """
    cfg = host_config(config)
    if config.model.restore_from_path is not None:
        cfg.model = load_and_override_model_config(str(config.model.restore_from_path), cfg.model)
    trainer = MegatronTrainerBuilder(cfg).create_trainer()
    if config.model.restore_from_path is not None:
        actor = load_from_nemo(
            MegatronGPTTEPOActorModel, cfg.model, trainer, strict=True, restore_path=str(config.model.restore_from_path)
        )
    else:
        torch.manual_seed(config.seed)
        actor = MegatronGPTTEPOActorModel(cfg.model, trainer)
    init_distributed(trainer, actor, cfg.model.get("transformer_engine", False))
    # Lightning sizes its schedules by a loader; ours has nothing to size.
    examples = list(range(config.layout.responses_per_update))
    init_using_ptl(trainer, actor, torch.utils.data.DataLoader(examples, batch_size=len(examples)), examples)
    optimizer, _ = extract_optimizer_scheduler_from_ptl_model(actor)
    return Host(actor, optimizer)
