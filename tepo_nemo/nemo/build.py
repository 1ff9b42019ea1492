"""Builds the actor and its optimizer with NeMo's and NeMo-Aligner's own set-up helpers."""

from dataclasses import dataclass

import torch
from nemo_aligner.utils.train_script_utils import (
    extract_optimizer_scheduler_from_ptl_model,
    init_distributed,
    init_using_ptl,
)
from torch.optim import Optimizer

from tepo_nemo.config.schema import Config
from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel
from tepo_nemo.nemo.host_config import host_config
from tepo_nemo.nemo.host_trainer import create_trainer
from tepo_nemo.nemo.origin import describe_files
from tepo_nemo.nemo.restore import restore


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
    if config.model.restore_from_path is not None:
        actor, trainer = restore(config, cfg)
    else:
        trainer = create_trainer(config, cfg)
        torch.manual_seed(config.seed)
        actor = MegatronGPTTEPOActorModel(cfg.model, trainer)
    init_distributed(trainer, actor, cfg.model.get("transformer_engine", False))
    # Lightning sizes its schedules by a loader; ours has nothing to size.
    examples = list(range(config.layout.data))
    init_using_ptl(trainer, actor, torch.utils.data.DataLoader(examples, batch_size=len(examples)), examples)
    optimizer, _ = extract_optimizer_scheduler_from_ptl_model(actor)
    if not actor.huggingface_files:
        actor.huggingface_files = describe_files(actor, config)
    return Host(actor, optimizer)
