"""From per-token terms to one number. All terms of a loss go through here, so they share one denominator."""

from typing import Literal

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import MinibatchTotals, TokenBatch

Aggregation = Literal[
    "token-mean", "group-token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


def aggregate(
    values: Tensor, tokens: TokenBatch, totals: MinibatchTotals, aggregation: Aggregation
) -> Tensor:
    """This micro-batch's share (0-d) of the mini-batch aggregate of `values` [S, T]; the shares add up to it.

    Masked values may be anything, NaN included: they reach neither the result nor the gradient. With nothing
    to train on the share is a 0 that is still attached to the graph. `TokenBatch.token_weights` multiply the
    value of each token; its gradient they have multiplied already. No denominator knows of them.
    """
    values = torch.where(tokens.mask, values, 0)
    if tokens.token_weights is not None:
        values = values + ((tokens.token_weights - 1) * values).detach()
    sums = values.sum(-1)
    return (sums / _denominator(tokens, totals, aggregation)).sum()


def _denominator(tokens: TokenBatch, totals: MinibatchTotals, aggregation: Aggregation) -> Tensor | int:
    """What each response's sum of token values is divided by, [S] or one number for all.

    Responses without a trained token do not count; the lower bound of 1 is reached only where the sums are 0.
    """
    responses = max(totals.responses, 1)
    match aggregation:
        case "token-mean":
            return max(totals.tokens, 1)
        case "group-token-mean":
            return tokens.group_tokens.clamp(min=1) * max(totals.groups, 1)
        case "seq-mean-token-mean":
            return tokens.lengths.clamp(min=1) * responses
        case "seq-mean-token-sum":
            return responses
        case "seq-mean-token-sum-norm":
            return responses * totals.max_response_length
