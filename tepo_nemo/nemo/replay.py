"""Opens dumped rollouts for a configuration, and refuses those that it cannot train on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tepo_nemo.config.flat import flat
from tepo_nemo.config.messages import shown
from tepo_nemo.config.resume import may_change
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.training.replay import read_dumps

# What a replay says otherwise without a word: where it starts from is its own choice.
_OWN_KEYS = ("replay", "model.restore_from_path")
_KEYS_TOLD = 5


@dataclass(frozen=True)
class Replay:
    """Steps to train on again."""

    folders: Mapping[int, Path]  # by number of the step
    note: str | None  # what differs from the run that made them

    @property
    def first(self) -> int:
        return min(self.folders)


def about_run(config: Config, vocab_size: int) -> dict[str, Any]:
    """What a dump says of the run that made it."""
    return {"seed": config.seed, "vocab_size": vocab_size, "config": flat(config)}


def open_replay(config: Config, *, vocab_size: int, sequence_length: int) -> tuple[Config, Replay | None]:
    """The steps that `replay` names, and the configuration up to the last of them; None for no replay.

    Args:
        vocab_size: of the true vocabulary.
        sequence_length: of the model, in tokens.

    Raises:
        UserError: a dump cannot be read, is of a model with another vocabulary, or does not fit the batch
            arithmetic or the lengths of the configuration.
    """
    if config.replay is None:
        return config, None
    dumps = read_dumps(config.replay)
    for folder, dump in dumps.values():
        made_with = dump.about.get("vocab_size")
        if made_with != vocab_size:
            raise UserError(
                f"replay={folder}: is of a model with {made_with} tokens, and this one has {vocab_size} "
                "(give the model that made it)"
            )
        if dump.collected.kept is not None:
            _check_fits(dump.collected.kept, folder, config, vocab_size, sequence_length)
    _, first = dumps[min(dumps)]
    note = _differences(first.about.get("config", {}), flat(config))
    trainer = config.trainer.model_copy(update={"max_steps": max(dumps)})
    replay = Replay({step: folder for step, (folder, _) in dumps.items()}, note)
    return config.model_copy(update={"trainer": trainer}), replay


def _check_fits(
    kept: ScoredBatch, folder: Path, config: Config, vocab_size: int, sequence_length: int
) -> None:
    prompts, lengths = kept.rollouts.prompts, kept.rollouts.generation.lengths
    group, asked = config.rollout.responses_per_prompt, torch.tensor([len(each.tokens) for each in prompts])
    ids = torch.cat([kept.rollouts.generation.tokens.flatten(), *(torch.tensor(p.tokens) for p in prompts)])
    for key, lowest, highest, found in (
        ("rollout.responses_per_prompt", group, group, kept.rollouts.groups.bincount()),
        ("rollout.prompts_per_step", 1, config.rollout.prompts_per_step, torch.tensor([len(prompts)])),
        ("rollout.max_response_length", 1, config.rollout.max_response_length, lengths),
        ("model.encoder_seq_length", 1, sequence_length, asked[kept.rollouts.groups] + lengths),
        ("model.vocab_size", 0, vocab_size - 1, ids),
    ):
        wrong = found[(found < lowest) | (found > highest)]
        if len(wrong):
            raise UserError(
                f"replay={folder}: has {int(wrong[0])} where {key} allows {lowest} to {highest} (take the "
                "configuration of the run that made it)"
            )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """A line that names the keys which differ; None where the updates are those of the run."""
    keys = [
        key
        for key in {**old, **new}
        if not may_change(key) and key not in _OWN_KEYS and old.get(key) != new.get(key)
    ]
    if not keys:
        return None
    told = ", ".join(
        f"{key} was {shown(old.get(key))}, is {shown(new.get(key))}" for key in keys[:_KEYS_TOLD]
    )
    more = f" and {len(keys) - _KEYS_TOLD} more" if len(keys) > _KEYS_TOLD else ""
    return f"replay: not the configuration that made the rollouts: {told}{more}"
