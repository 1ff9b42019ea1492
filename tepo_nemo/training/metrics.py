"""Metrics that the trainer itself counts; those of the loss come from the objective."""

from collections.abc import Sequence

import torch

from tepo_nemo.objectives.advantage import zero_spread_fraction
from tepo_nemo.objectives.contract import Mean
from tepo_nemo.rollout.protocol import Generation
from tepo_nemo.training.batch import MiniBatch
from tepo_nemo.training.collect import CollectedStep

# What the updates of a step are measured by; not a number in a step without any.
UPDATE_METRICS = (
    "loss",
    "grad_norm",
    "ratio/mean",
    "ratio/clip_fraction",
    "kl/mean",
    "kl/masked_mean",
    "mask/fraction",
    "entropy/mean",
    "entropy/delta_mean",
    "rollout/logprob_gap_mean",
    "tokens/padding_fraction",
)


def rollout_metrics(collected: CollectedStep) -> dict[str, float]:
    """Over everything that was generated in the step, before dynamic sampling drops groups."""
    scored = collected.generated
    generation = scored.rollouts.generation
    valid = scored.valid
    rewards = scored.rewards[valid]
    return {
        "reward/mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward/group_std_zero_fraction": float(
            zero_spread_fraction(scored.rewards, scored.rollouts.groups, valid)
        ),
        "response_length/mean": float(generation.lengths.double().mean()),
        "response_length/truncated_fraction": float((~generation.finished).double().mean()),
        "verifier/failed_fraction": float((~valid).double().mean()),
    }


def batch_means(mini_batches: Sequence[MiniBatch], generation: Generation) -> dict[str, Mean]:
    """This rank's share of `rollout/logprob_gap_mean` and `tokens/padding_fraction`.

    The gap is the mean over trained tokens of the absolute difference between the sampler's log-prob and
    the trainer's own old log-prob.
    """
    gap = torch.zeros((), dtype=torch.float64)
    trained = torch.zeros((), dtype=torch.float64)
    padding = torch.zeros((), dtype=torch.float64)
    positions = torch.zeros((), dtype=torch.float64)
    for mini_batch in mini_batches:
        for micro in mini_batch.micro_batches:
            own = micro.rows >= 0
            lengths = micro.mask.sum(dim=1)
            sampled = torch.zeros_like(micro.advantages)
            columns = torch.arange(generation.logprobs.shape[1]) < lengths[:, None]
            sampled[micro.mask] = generation.logprobs[micro.rows.clamp(min=0)][columns]
            gap += torch.where(micro.mask, (micro.old.logprobs.cpu() - sampled).abs(), 0).double().sum()
            trained += micro.mask.sum()
            positions += micro.mask.numel()
            # Row by row, what precedes the last trained target is a prompt or a response token.
            ends = micro.mask.shape[1] - micro.mask.flip(1).int().argmax(dim=1)
            padding += micro.mask.numel() - torch.where(own & (lengths > 0), ends, 0).sum()
    return {
        "rollout/logprob_gap_mean": Mean(gap, trained),
        "tokens/padding_fraction": Mean(padding, positions),
    }
