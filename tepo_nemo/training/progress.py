"""A step between two of its updates: how it is written down, so that a stopped run goes on inside the step.

The rollout, its rewards and the statistics of the weights that made it are kept by response, whatever layout
they were made at. What has been measured in the updates so far stays with each rank, so that at the same
layout the metrics of the step are the same to the bit; another layout gets their sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import Mean
from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.training.batch import MicroBatch, MiniBatch, TokenStatistics, TrainBatch
from tepo_nemo.training.policy import Policy
from tepo_nemo.training.shaping import whole_by_response, with_advantages
from tepo_nemo.training.stored import scored_numbers, scored_tensors, stored_scored


@dataclass
class StepProgress:
    """What the updates of a step have come to."""

    metrics: dict[str, float]  # of the rollout
    kept: ScoredBatch
    advantages: Tensor  # [R] fp32, of responses
    means: dict[str, Mean]  # this rank's shares
    done: int = 0  # updates made or skipped
    trained_tokens: int = 0
    grad_norms: list[float] = field(default_factory=list)
    not_finite: int = 0  # updates skipped for it
    spikes: int = 0  # likewise
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, of an earlier process


@dataclass(frozen=True)
class SavedProgress:
    """A step's progress as it is stored."""

    numbers: dict[str, Any]
    """JSON of the main rank."""
    by_response: dict[str, Tensor]
    """The same on every rank."""
    own: dict[str, Tensor]
    """This rank's."""


def dump_progress(
    policy: Policy, progress: StepProgress, batch: TrainBatch, left: Sequence[MiniBatch]
) -> SavedProgress:
    """Called by all ranks.

    Args:
        batch: of the step.
        left: its mini-batches that have had no update, with all that was measured once a rollout.
    """
    tensors = scored_tensors(progress.kept) | {"advantages": progress.advantages}
    micro_batches = [micro for mini in left for micro in mini.micro_batches]
    if micro_batches:
        whole = partial(whole_by_response, policy, micro_batches, batch)
        tensors["token_advantages"] = whole([micro.advantages for micro in micro_batches])
        tensors["old_logprobs"] = whole([micro.old.logprobs for micro in micro_batches])
        tensors["old_entropy"] = whole([micro.old.entropy for micro in micro_batches])
        if micro_batches[0].reference_logprobs is not None:
            tensors["reference_logprobs"] = whole([micro.reference_logprobs for micro in micro_batches])
    return SavedProgress(
        numbers={
            "metrics": progress.metrics,
            "done": progress.done,
            "trained_tokens": progress.trained_tokens,
            "grad_norms": progress.grad_norms,
            "not_finite": progress.not_finite,
            "spikes": progress.spikes,
            "seconds": progress.seconds,
            **scored_numbers(progress.kept),
        },
        by_response=tensors,
        own={
            f"{name}#{part}": getattr(mean, part).cpu()
            for name, mean in progress.means.items()
            for part in ("numerator", "denominator")
        },
    )


def load_progress(saved: SavedProgress) -> StepProgress:
    """The inverse, but for the mini-batches (see `with_saved_statistics`)."""
    numbers, tensors = saved.numbers, saved.by_response
    means = {}
    for name in dict.fromkeys(key.rpartition("#")[0] for key in saved.own):
        means[name] = Mean(saved.own[f"{name}#numerator"], saved.own[f"{name}#denominator"])
    return StepProgress(
        metrics={key: float("nan") if value is None else value for key, value in numbers["metrics"].items()},
        kept=stored_scored(numbers, tensors),
        advantages=tensors["advantages"],
        means=means,
        done=numbers["done"],
        trained_tokens=numbers["trained_tokens"],
        grad_norms=numbers["grad_norms"],
        not_finite=numbers["not_finite"],
        spikes=numbers["spikes"],
        seconds=numbers["seconds"],
    )


def with_saved_statistics(
    mini_batches: Sequence[MiniBatch], done: int, by_response: dict[str, Tensor]
) -> list[MiniBatch]:
    """Attach to the mini-batches after the first `done` what was measured before the first update."""

    def attach(micro: MicroBatch) -> MicroBatch:
        reference = by_response.get("reference_logprobs")
        micro = with_advantages(micro, by_response["token_advantages"])
        return replace(
            micro,
            old=TokenStatistics(
                micro.of_responses(by_response["old_logprobs"]),
                micro.of_responses(by_response["old_entropy"]),
            ),
            reference_logprobs=None if reference is None else micro.of_responses(reference),
        )

    return [
        *mini_batches[:done],
        *(
            replace(mini, micro_batches=[attach(micro) for micro in mini.micro_batches])
            for mini in mini_batches[done:]
        ),
    ]


def sum_of_shares(shares: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The `own` of all data-parallel ranks together, for one rank of another layout."""
    names = dict.fromkeys(name for share in shares for name in share)
    return {
        name: torch.stack([share[name] for share in shares if name in share]).sum(dim=0) for name in names
    }
