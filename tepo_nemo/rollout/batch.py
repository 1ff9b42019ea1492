"""Prompts, the responses to them, and their rewards: the stations of a step before training.

    prompts -> `RolloutBatch` -> `ScoredBatch`

Shapes: ``B`` prompts (groups), ``R`` responses. A group is known by its prompt's number, never by position
or by comparing tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tepo_nemo.data.prompts import Prompt
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.rollout.protocol import Generation, concatenate_generations


class TokenizedPrompt(NamedTuple):
    """A prompt and its token ids."""

    prompt: Prompt
    tokens: list[int]


@dataclass(frozen=True)
class RolloutBatch:
    """R responses to B prompts; the same on every rank."""

    prompts: Sequence[TokenizedPrompt]  # B
    groups: Tensor  # [R] int64, number of the response's prompt in `prompts`
    samples: Tensor  # [R] int64, number of the response inside its group
    generation: Generation  # R rows

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(frozen=True)
class ScoredBatch:
    """Rollouts with their rewards; the same on every rank but for the texts."""

    rollouts: RolloutBatch
    texts: Sequence[str]  # R, on the main rank; empty elsewhere
    results: Sequence[RewardResult]  # R

    @property
    def rewards(self) -> Tensor:
        """[R] float64."""
        return torch.tensor([result.value for result in self.results], dtype=torch.float64)

    @property
    def correctness(self) -> Tensor:
        """[R] float64: how right the answers are, whatever else is rewarded."""
        return torch.tensor([result.correct for result in self.results], dtype=torch.float64)

    @property
    def valid(self) -> Tensor:
        """[R] bool: False where grading failed; such a response neither votes nor is trained on."""
        return torch.tensor(
            [result.status in ("ok", "unparseable") for result in self.results], dtype=torch.bool
        )

    def select_groups(self, groups: Sequence[int]) -> "ScoredBatch":
        """The given groups alone, renumbered from 0 in the given order."""
        owner = self.rollouts.groups
        rows = torch.cat([torch.nonzero(owner == group).flatten() for group in groups])
        numbers = {group: number for number, group in enumerate(groups)}
        return ScoredBatch(
            rollouts=RolloutBatch(
                prompts=[self.rollouts.prompts[group] for group in groups],
                groups=torch.tensor([numbers[group] for group in owner[rows].tolist()], dtype=torch.int64),
                samples=self.rollouts.samples[rows],
                generation=self.rollouts.generation.select(rows),
            ),
            texts=[self.texts[row] for row in rows.tolist()],
            results=[self.results[row] for row in rows.tolist()],
        )


def concatenate_scored(parts: Sequence[ScoredBatch]) -> ScoredBatch:
    """Join scored batches; the groups of later parts are numbered on."""
    offsets = [0]
    for part in parts:
        offsets.append(offsets[-1] + len(part.rollouts.prompts))
    return ScoredBatch(
        rollouts=RolloutBatch(
            prompts=[prompt for part in parts for prompt in part.rollouts.prompts],
            groups=torch.cat(
                [part.rollouts.groups + offset for part, offset in zip(parts, offsets, strict=False)]
            ),
            samples=torch.cat([part.rollouts.samples for part in parts]),
            generation=concatenate_generations([part.rollouts.generation for part in parts]),
        ),
        texts=[text for part in parts for text in part.texts],
        results=[result for part in parts for result in part.results],
    )
