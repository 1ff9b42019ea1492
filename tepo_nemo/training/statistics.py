"""Forward-only statistics that the updates need: of the old and the reference policy, of a mini-batch."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tepo_nemo.objectives.contract import Mean, MinibatchStatistics, Objective
from tepo_nemo.training.batch import MiniBatch
from tepo_nemo.training.policy import Policy
from tepo_nemo.training.selection import with_selection


def with_old_statistics(
    policy: Policy, mini_batches: Sequence[MiniBatch], *, first_too: bool
) -> list[MiniBatch]:
    """Attach log-prob and entropy under the weights that made the rollout.

    The micro-batches are those of the updates, so that old and new values come from the same code, shapes
    and settings, and differ only where the weights do. The first mini-batch is left as it is unless
    `first_too`: its update starts from those very weights, so that its own forward gives the old values too.
    """
    own = 0 if first_too else 1
    if len(mini_batches) == own:
        return list(mini_batches)
    statistics = policy.get_token_statistics(mini_batches[own:])
    return [
        *mini_batches[:own],
        *(
            MiniBatch(
                [micro.with_old(old) for micro, old in zip(mini.micro_batches, olds, strict=True)],
                mini.totals,
            )
            for mini, olds in zip(mini_batches[own:], statistics, strict=True)
        ),
    ]


def with_reference_logprobs(policy: Policy, mini_batches: Sequence[MiniBatch]) -> list[MiniBatch]:
    """Attach log-probs under the frozen reference policy.

    Costs one forward-only pass over the rollout, and moving the weights in and out; only objectives that ask
    for it pay.
    """
    return [
        replace(
            mini,
            micro_batches=[
                replace(micro, reference_logprobs=logprobs)
                for micro, logprobs in zip(mini.micro_batches, of_mini, strict=True)
            ],
        )
        for mini, of_mini in zip(mini_batches, policy.get_reference_logprobs(mini_batches), strict=True)
    ]


def with_minibatch_statistics(
    policy: Policy, objective: Objective, mini_batch: MiniBatch, seed: int
) -> MiniBatch:
    """Attach means over the mini-batch's valid tokens, and the tokens that the objective selects among them.

    Both are taken under the weights before the update. Costs one forward-only pass over the mini-batch; only
    objectives that ask for it pay.

    Args:
        seed: of the objective's draws at this step.
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
    mini_batch = replace(
        mini_batch,
        totals=replace(
            mini_batch.totals,
            statistics=MinibatchStatistics(
                advantage_mean=torch.tensor(means["advantage"]), logprob_mean=torch.tensor(means["logprob"])
            ),
        ),
    )
    if objective.needs_selection:
        return with_selection(policy, objective, mini_batch, statistics, seed)
    return mini_batch
