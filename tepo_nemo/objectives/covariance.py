"""Covariance of advantage and log-probability, token by token over a whole mini-batch (arXiv 2505.22617).

To first order its mean is the entropy that an update costs: what Clip-Cov and KL-Cov select by, and one of
TEPO's measures of an entropy drop.
"""

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import MinibatchStatistics, TokenBatch


@torch.no_grad()
def token_covariance(tokens: TokenBatch, statistics: MinibatchStatistics) -> Tensor:
    """(A - mean A)(logp - mean logp) of each token, [S, T], in nats times advantage; without gradient.

    The means are over the mini-batch's valid tokens. Masked positions hold values without a meaning.
    """
    return (tokens.advantages - statistics.advantage_mean) * (tokens.logprobs - statistics.logprob_mean)
