"""Metrics that the trainer itself counts; those of the loss come from the objective."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tepo_nemo.objectives.advantage import zero_spread_fraction
from tepo_nemo.objectives.contract import Mean, TokenBatch
from tepo_nemo.rollout.correction import LOG_RATIO_LIMIT
from tepo_nemo.training.batch import MicroBatch, MiniBatch
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
    "rollout/logprob_error_mean",
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
        "verifier/failed_fraction": float((~valid & (generation.lengths > 0)).double().mean()),
        "rollout/invalid_fraction": float((generation.lengths == 0).double().mean()),
    }


def skipped_updates(count: int, not_finite: int = 0, spikes: int = 0) -> dict[str, float]:
    """Of a step, and of how many of them that is the reason."""
    return {"update/skipped": count, "update/not_finite": not_finite, "update/spikes": spikes}


def padding_mean(mini_batches: Sequence[MiniBatch]) -> dict[str, Mean]:
    """This rank's share of `tokens/padding_fraction`: positions after a response's last trained target."""
    padding = torch.zeros((), dtype=torch.float64)
    positions = torch.zeros((), dtype=torch.float64)
    for mini_batch in mini_batches:
        for micro in mini_batch.micro_batches:
            ends = micro.mask.shape[1] - micro.mask.flip(1).int().argmax(dim=1)
            positions += micro.mask.numel()
            padding += micro.mask.numel() - torch.where(micro.mask.any(dim=1), ends, 0).sum()
    return {"tokens/padding_fraction": Mean(padding, positions)}


def logprob_gap(micro_batch: MicroBatch, old_logprobs: Tensor) -> dict[str, Mean]:
    """A micro-batch's share of `rollout/logprob_gap_mean` and of `rollout/logprob_error_mean`; nothing where
    nothing was sampled.

    Means over trained tokens of the absolute difference d between the sampler's log-prob and the trainer's
    own under the same weights, `old_logprobs` [S, L], and of exp(d), in which few large d show.
    """
    if micro_batch.sampled_logprobs is None:
        return {}
    mask = micro_batch.mask
    gap = (old_logprobs - micro_batch.sampled_logprobs).double().abs().where(mask, 0)
    error = gap.clamp(max=LOG_RATIO_LIMIT).exp().where(mask, 0)
    tokens = mask.sum().double()
    return {
        "rollout/logprob_gap_mean": Mean(gap.sum(), tokens),
        "rollout/logprob_error_mean": Mean(error.sum(), tokens),
    }


def weight_metrics(tokens: TokenBatch) -> dict[str, Mean]:
    """A micro-batch's share of what the rollout correction does; nothing where it is off."""
    if tokens.token_weights is None:
        return {}
    count = tokens.mask.sum().double()
    dropped = tokens.mask & (tokens.token_weights == 0)
    return {
        "rollout/weight_mean": Mean(tokens.token_weights.double().sum(), count),
        "rollout/dropped_fraction": Mean(dropped.sum().double(), count),
    }
