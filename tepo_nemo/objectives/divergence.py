"""Per-token estimates of KL(current policy || other policy) from the sampled token alone."""

from typing import Literal

import torch
from torch import Tensor

from tepo_nemo.objectives.ratio import bound_log_ratio

KLEstimator = Literal["k1", "k2", "k3", "abs"]


def divergence(log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimates the KL from d = logp - logp_other, any shape (Schulman, "Approximating KL Divergence").

    - `k3`: exp(-d) + d - 1, never negative
    - `k2`: d^2 / 2
    - `abs`: |d|
    - `k1`: value d, gradient of k2. The plain gradient of d is 1 for every token, also where the policies
      agree: it pushes sampled tokens down without bound instead of pulling the policies together

    All have gradient 0 at d = 0. The tokens were drawn from the old policy, so none is unbiased for
    KL(current || other) once the current policy has moved away from it.
    """
    d = bound_log_ratio(log_ratio)
    match estimator:
        case "k3":
            return torch.expm1(-d) + d  # expm1: exp(-d) - 1 would lose the small d of on-policy tokens
        case "k2":
            return d.square() / 2
        case "abs":
            return d.abs()
        case "k1":
            k2 = d.square() / 2
            return d.detach() + (k2 - k2.detach())
