"""Forward-only statistics that the updates need: the old policy's, and those of a whole mini-batch."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tepo_nemo.objectives.contract import Mean, MinibatchStatistics
from tepo_nemo.training.batch import MiniBatch
from tepo_nemo.training.policy import Policy


def with_old_statistics(policy: Policy, mini_batches: Sequence[MiniBatch]) -> list[MiniBatch]:
    """Attach log-prob and entropy under the weights that made the rollout.

    The micro-batches are those of the updates, so that old and new values come from the same code, shapes
    and settings, and differ only where the weights do. The first mini-batch is left as it is: its update
    starts from those very weights, so that its own forward gives the old values too.
    """
    first, *others = mini_batches
    if not others:
        return [first]
    statistics = policy.get_token_statistics(others)
    return [
        first,
        *(
            MiniBatch(
                [micro.with_old(old) for micro, old in zip(mini.micro_batches, olds, strict=True)],
                mini.totals,
            )
            for mini, olds in zip(others, statistics, strict=True)
        ),
    ]


def with_minibatch_statistics(policy: Policy, mini_batch: MiniBatch) -> MiniBatch:
    """Attach means over the mini-batch's valid tokens, under the weights before its update.

    Costs one forward-only pass over the mini-batch; only objectives that ask for it pay.
    """
    (statistics,) = policy.get_token_statistics([mini_batch])
    sums = {
        "advantage": torch.zeros((), dtype=torch.float64),
        "logprob": torch.zeros((), dtype=torch.float64),
    }
    for micro, current in zip(mini_batch.micro_batches, statistics, strict=True):
        sums["advantage"] += torch.where(micro.mask, micro.advantages, 0).double().sum()
        sums["logprob"] += torch.where(micro.mask, current.logprobs.cpu(), 0).double().sum()
    # The tokens are counted already, so each rank carries its part of that count as denominator.
    tokens = torch.tensor(max(mini_batch.totals.tokens, 1) / policy.data_parallel_size, dtype=torch.float64)
    means = policy.reduce_metrics({name: Mean(value, tokens) for name, value in sums.items()})
    return replace(
        mini_batch,
        totals=replace(
            mini_batch.totals,
            statistics=MinibatchStatistics(
                advantage_mean=torch.tensor(means["advantage"]), logprob_mean=torch.tensor(means["logprob"])
            ),
        ),
    )
