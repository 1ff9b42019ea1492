"""Advantages of tokens from how the policy has moved away from a reference: what ERPO and EP-GRPO share."""

from abc import abstractmethod
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from tepo_nemo.objectives.advantage import STD_EPSILON
from tepo_nemo.objectives.aggregation import Aggregation, aggregate
from tepo_nemo.objectives.contract import MinibatchTotals, Objective, ObjectiveOutput, TokenBatch
from tepo_nemo.objectives.metrics import policy_metrics
from tepo_nemo.objectives.options import ClipWidth, Coefficient, DualClip
from tepo_nemo.objectives.ratio import importance_ratio
from tepo_nemo.objectives.rollout import RolloutTokens
from tepo_nemo.objectives.surrogate import ppo_surrogate


class ProcessAdvantageObjective(Objective):
    """GRPO's clipped surrogate on token ratios, with advantages that a process signal tells apart; no KL.

        s   = beta_p (logp_old - logp_ref)                     the process signal
        W   = sigmoid( gamma (H_old - mu_G) / (sigma_G + d) )  the gate; statistics over the group's tokens
        s~  = (s - mu_k) / (sigma_k + d)                       over the group's tokens in the same bucket k
        Psi = sigma_target W D s~ / (std + d)                  over those of the group's W D s~ that are not 0
        A'  = A + eta Psi, standardised like s~ over the group's tokens

    beta_p is `process_scale`, gamma `gate_sharpness`, sigma_target `process_std`, eta `process_weight`, and
    d = 1e-6. A subclass says which of K = `buckets` buckets a token is in, and the direction D of a response.
    While the policy is still the reference, s = 0 and A alone is left, standardised over tokens. Our reading:
    standard deviations divide by the number of values, so that a bucket of one token gives 0, and the loss is
    GRPO's, for A < 0 with a dual clip c.
    """

    process_scale: Coefficient
    gate_sharpness: Coefficient
    buckets: Annotated[int, Field(ge=1)]
    process_std: Coefficient
    process_weight: Coefficient
    clip_low: ClipWidth
    clip_high: ClipWidth
    dual_clip: DualClip
    aggregation: Aggregation

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def shapes_advantages(self) -> bool:
        return True

    @abstractmethod
    def bucket(self, rollout: RolloutTokens) -> Tensor:
        """Bucket of each token, [R, T] int64 in 0 to K - 1; any on masked ones."""

    @abstractmethod
    def direction(self, rollout: RolloutTokens) -> Tensor:
        """Which way the signal of each response counts, [R]: -1, 0 or 1."""

    def shape_advantages(self, rollout: RolloutTokens) -> Tensor:
        """[R, T], in the dtype of the responses' advantages; arithmetic in float64. 0 on masked tokens."""
        assert rollout.reference_logprobs is not None, "the process signal needs reference log-probabilities"
        mask = rollout.mask
        response = torch.arange(len(mask)).unsqueeze(-1).expand_as(mask)[mask]
        group = torch.unique(rollout.groups, return_inverse=True)[1][response]
        signal = self.process_scale * (rollout.old_logprobs - rollout.reference_logprobs)[mask].double()

        gate = torch.sigmoid(
            self.gate_sharpness * _within(rollout.old_entropy[mask].double(), group).standardised
        )
        signal = _within(signal, group * self.buckets + self.bucket(rollout)[mask]).standardised
        signal = gate * self.direction(rollout)[response] * signal
        own = signal != 0
        signal[own] *= self.process_std / (_within(signal[own], group[own]).std + STD_EPSILON)
        advantages = rollout.advantages[response].double() + self.process_weight * signal
        advantages = _within(advantages, group).standardised
        return rollout.advantages.new_zeros(mask.shape).masked_scatter(
            mask, advantages.to(rollout.advantages.dtype)
        )

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        ratio = importance_ratio(tokens, "token")
        surrogate = ppo_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high, self.dual_clip)
        metrics = policy_metrics(tokens, ratio=ratio, clipped=surrogate.clipped)
        return ObjectiveOutput(aggregate(-surrogate.value, tokens, totals, self.aggregation), metrics)


class _Within(NamedTuple):
    """Of each of n values, [n] each."""

    deviation: Tensor  # from the mean of its part; exactly 0 where all of a part are equal
    std: Tensor  # of its part, the root of the mean square of the deviations

    @property
    def standardised(self) -> Tensor:
        return self.deviation / (self.std + STD_EPSILON)


def _within(values: Tensor, part: Tensor) -> _Within:
    """Statistics of float64 values [n] within the parts that small numbers [n] name."""
    count = torch.bincount(part).clamp(min=1)
    zeros = values.new_zeros(len(count))

    def mean(of: Tensor) -> Tensor:
        return (zeros.index_add(0, part, of) / count)[part]

    # Rounding can leave a deviation of equal values above 0, which a division by their std would blow up.
    highest = zeros.sub(torch.inf).scatter_reduce(0, part, values, "amax")
    lowest = zeros.add(torch.inf).scatter_reduce(0, part, values, "amin")
    deviation = torch.where((highest > lowest)[part], values - mean(values), 0)
    return _Within(deviation, mean(deviation.square()).sqrt())
