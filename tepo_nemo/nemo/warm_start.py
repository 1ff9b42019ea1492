"""Trains a model on given answers and saves it, so that reinforcement learning starts from one that is
sometimes right."""

from collections.abc import Callable
from pathlib import Path

from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.nemo.build import build_host
from tepo_nemo.nemo.prompts import answer_tokens, load_tokenized
from tepo_nemo.nemo.run import connect_policy
from tepo_nemo.objectives import registry
from tepo_nemo.training.supervised import train_supervised


def warm_start(
    config: Config, output: Path, *, steps: int, batch_size: int, report: Callable[[int, float], None]
) -> None:
    """Next-token training on the gold answers of `data.train`; called by every rank.

    Args:
        config: model, data, optimizer and the limits of a micro-batch are taken from it.
        output: the `.nemo` file to write.
        steps: optimizer updates.
        batch_size: problems of an update, over all ranks.
        report: called after each update with its number (from 1) and the mean loss in nats a token.
    """
    if batch_size < config.layout.data:
        raise UserError(
            f"--batch-size={batch_size}: leaves some of the {config.layout.data} data-parallel copies of the "
            f"model without work; make it at least {config.layout.data}"
        )
    host = build_host(config)
    tokenizer = host.actor.tokenizer
    prompts = load_tokenized(
        config.data.train,
        tokenizer,
        key="data.train",
        max_response_length=config.rollout.max_response_length,
        sequence_length=host.actor.cfg.encoder_seq_length,
    )
    policy = connect_policy(host, config, registry.build("next_token", {}))
    train_supervised(
        policy,
        prompts,
        answer_tokens(prompts, tokenizer),
        seed=config.seed,
        steps=steps,
        batch_size=batch_size,
        micro_batch_size=config.trainer.micro_batch_size,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        sequence_packing=config.trainer.sequence_packing,
        learning_rate=config.trainer.optimizer.learning_rate,
        report=report,
    )
    policy.save(output)
