"""ERPO: Token-Level Entropy-Regulated Policy Optimization (arXiv 2603.28204)."""

import torch
from torch import Tensor

from tepo_nemo.objectives.process_advantage import ProcessAdvantageObjective
from tepo_nemo.objectives.registry import register
from tepo_nemo.objectives.rollout import RolloutTokens


@register("erpo")
class Erpo(ProcessAdvantageObjective):
    """Token t of a response o, counted from 0, is in bucket k = floor(K t / |o|); the direction is sgn(A).

    In a group whose rewards are all equal A = 0, and so are all of its advantages.
    """

    def bucket(self, rollout: RolloutTokens) -> Tensor:
        place = torch.arange(rollout.mask.shape[1])
        return self.buckets * place // rollout.lengths.clamp(min=1).unsqueeze(-1)

    def direction(self, rollout: RolloutTokens) -> Tensor:
        return rollout.advantages.sign()
