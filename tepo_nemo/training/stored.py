"""Scored rollouts as JSON and tensors, as checkpoints and dumps hold them."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from torch import Tensor

from tepo_nemo.data.prompts import Prompt
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.rollout.batch import RolloutBatch, ScoredBatch, TokenizedPrompt
from tepo_nemo.rollout.protocol import Generation

_GENERATION = [each.name for each in fields(Generation)]


def scored_numbers(scored: ScoredBatch) -> dict[str, Any]:
    """What of it is JSON."""
    return {
        "prompts": [
            {"prompt": asdict(prompt.prompt), "tokens": prompt.tokens} for prompt in scored.rollouts.prompts
        ],
        "texts": list(scored.texts),
        "results": [asdict(result) for result in scored.results],
    }


def scored_tensors(scored: ScoredBatch) -> dict[str, Tensor]:
    """The rest of it."""
    rollouts = scored.rollouts
    return {
        "groups": rollouts.groups,
        "samples": rollouts.samples,
        **{f"generation.{name}": getattr(rollouts.generation, name) for name in _GENERATION},
    }


def stored_scored(numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ScoredBatch:
    """The inverse of both. Raises KeyError, TypeError or ValueError where something is missing or strange."""
    prompts = [TokenizedPrompt(Prompt(**each["prompt"]), each["tokens"]) for each in numbers["prompts"]]
    generation = Generation(**{name: tensors[f"generation.{name}"] for name in _GENERATION})
    return ScoredBatch(
        RolloutBatch(prompts, tensors["groups"], tensors["samples"], generation),
        numbers["texts"],
        [RewardResult(**result) for result in numbers["results"]],
    )
