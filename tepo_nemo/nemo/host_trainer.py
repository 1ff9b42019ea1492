"""Lightning's trainer, which NeMo's classes want to have; the loop is ours."""

from datetime import timedelta

from lightning.pytorch.trainer.trainer import Trainer
from nemo.collections.nlp.parts.megatron_trainer_builder import MegatronTrainerBuilder
from omegaconf import DictConfig

from tepo_nemo.config.schema import Config


def create_trainer(config: Config, cfg: DictConfig) -> Trainer:
    """The trainer of NeMo's form `cfg` of a configuration."""
    trainer = MegatronTrainerBuilder(cfg).create_trainer()
    # Of its process group and, through NeMo's strategy, of all of Megatron's; the builder takes no argument
    # for it.
    trainer.strategy._timeout = timedelta(minutes=config.trainer.collective_timeout)
    return trainer
