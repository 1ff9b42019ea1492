"""Tokens that an objective selects among all of a mini-batch, whatever micro-batch or rank holds them."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import MinibatchStatistics, Objective
from tepo_nemo.rollout.sampling import row_keys, uniform_draws
from tepo_nemo.training.batch import MicroBatch, MiniBatch, TokenStatistics
from tepo_nemo.training.policy import Policy

_POSITION_BITS = 32


@torch.no_grad()
def with_selection(
    policy: Policy,
    objective: Objective,
    mini_batch: MiniBatch,
    current: Sequence[TokenStatistics],
    seed: int,
) -> MiniBatch:
    """Mark the tokens of the highest scores in the mini-batch, as many as the objective counts.

    Fewer are marked where there are fewer candidates. Equal scores go to the earlier response of the rollout,
    then to the earlier token, so that the marks depend on the scores alone. A rank offers its own best to the
    others, never more than are wanted.

    Args:
        mini_batch: with its statistics.
        current: of each micro-batch, under the weights before the update.
        seed: of the draws of this step.
    """
    totals = mini_batch.totals
    assert totals.statistics is not None
    offers = [
        _candidates(objective, micro, now, totals.statistics, seed)
        for micro, now in zip(mini_batch.micro_batches, current, strict=True)
    ]
    count = objective.selection_count(totals.tokens)
    own = _best(*map(torch.cat, zip(*offers, strict=True)), count)
    _, chosen = _best(*map(policy.gather_rows, own), count)
    return replace(
        mini_batch,
        micro_batches=[
            replace(micro, selected=torch.isin(_token_keys(micro), chosen))
            for micro in mini_batch.micro_batches
        ],
    )


def _candidates(
    objective: Objective,
    micro: MicroBatch,
    current: TokenStatistics,
    statistics: MinibatchStatistics,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Score (float64) and key of each candidate of a micro-batch, on the host."""
    device = current.logprobs.device
    keys = row_keys(seed, micro.rows.tolist(), [0] * len(micro.rows), device)
    draws = uniform_draws(keys, torch.arange(micro.mask.shape[1], device=device))
    scores = objective.selection_scores(micro.to(device).token_batch(current), statistics, draws)
    scores, token_keys = scores.double().cpu(), _token_keys(micro)
    candidates = micro.mask & (scores > -torch.inf)
    return scores[candidates], token_keys[candidates]


def _token_keys(micro: MicroBatch) -> Tensor:
    """A number for each position, int64 [S, L], in the order of responses and tokens of the rollout."""
    return (micro.rows[:, None] << _POSITION_BITS) + torch.arange(micro.mask.shape[1])


def _best(scores: Tensor, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest scores and their keys; the lower key among equals."""
    by_key = keys.argsort()
    order = by_key[scores[by_key].argsort(descending=True, stable=True)][:count]
    return scores[order], keys[order]
