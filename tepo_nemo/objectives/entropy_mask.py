"""TEPO's KL mask: the tokens that a positive advantage reinforces while their distribution loses entropy."""

from typing import Literal

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import MinibatchStatistics, TokenBatch
from tepo_nemo.objectives.covariance import token_covariance

KLMask = Literal["tepo", "all", "none"]
EntropyDrop = Literal["entropy", "surprisal", "covariance"]


def kl_token_mask(
    tokens: TokenBatch,
    kl_mask: KLMask,
    entropy_drop: EntropyDrop,
    tolerance: float,
    statistics: MinibatchStatistics | None,
) -> Tensor:
    """Trained tokens whose KL is penalised, bool [S, T]: `tepo` (A > 0 and entropy drop), `all` or `none`."""
    match kl_mask:
        case "tepo":
            drop = entropy_drop_score(tokens, entropy_drop, statistics) > tolerance
            return tokens.mask & (tokens.advantages > 0) & drop
        case "all":
            return tokens.mask
        case "none":
            return torch.zeros_like(tokens.mask)


@torch.no_grad()
def entropy_drop_score(
    tokens: TokenBatch, entropy_drop: EntropyDrop, statistics: MinibatchStatistics | None
) -> Tensor:
    """How strongly each token's entropy drops, [S, T]; positive is a drop.

    - `entropy`: H_old - H in nats, the drop itself
    - `surprisal`: logp - logp_old in nats, the sampled token became more likely
    - `covariance`: (A - mean A)(logp - mean logp), to first order the drop that this update will cause; the
      means are over the mini-batch's valid tokens
    """
    match entropy_drop:
        case "entropy":
            return tokens.old_entropy - tokens.entropy
        case "surprisal":
            return tokens.logprobs - tokens.old_logprobs
        case "covariance":
            assert statistics is not None, "entropy_drop=covariance needs the mini-batch statistics"
            return token_covariance(tokens, statistics)
