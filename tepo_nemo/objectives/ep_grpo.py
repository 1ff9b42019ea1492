"""EP-GRPO: Entropy-Progress Aligned GRPO (arXiv 2605.04960), as we read its abstract."""

import torch
from torch import Tensor

from tepo_nemo.objectives.process_advantage import ProcessAdvantageObjective
from tepo_nemo.objectives.registry import register
from tepo_nemo.objectives.rollout import RolloutTokens


@register("ep_grpo")
class EpGrpo(ProcessAdvantageObjective):
    """Progress through a response is the share of its entropy that lies before a token.

        k_t = floor(K * sum_{u<t} H_old,u / sum_u H_old,u),   at most K - 1

    The direction is sgn(A). In a group where every A is 0 it is +1 where all rewards are above 0 (all are
    correct) and -1 where none is, so that such groups still tell their tokens apart.
    """

    def bucket(self, rollout: RolloutTokens) -> Tensor:
        reached = torch.nn.functional.pad(rollout.old_entropy.double().cumsum(-1), (1, 0))
        total = reached[:, -1:]
        progress = torch.where(total > 0, reached[:, :-1] / total, 0)
        return (self.buckets * progress).long().clamp(0, self.buckets - 1)

    def direction(self, rollout: RolloutTokens) -> Tensor:
        group = torch.unique(rollout.groups, return_inverse=True)[1]
        voting = rollout.mask.any(-1)

        def some(of: Tensor) -> Tensor:
            """Whether it holds for some response of the group that is trained on, [R] bool."""
            count = torch.zeros(len(group), dtype=torch.int64).index_add(0, group, (of & voting).long())
            return count[group] > 0

        correct = rollout.rewards > 0
        verdict = some(correct).long() - some(~correct).long()  # 0 where both occur
        return torch.where(some(rollout.advantages != 0), rollout.advantages.sign(), verdict)
