"""Next-token prediction: the supervised warm start before reinforcement learning."""

import torch

from tepo_nemo.objectives.aggregation import aggregate
from tepo_nemo.objectives.contract import MinibatchTotals, Objective, ObjectiveOutput, TokenBatch
from tepo_nemo.objectives.divergence import divergence
from tepo_nemo.objectives.metrics import policy_metrics
from tepo_nemo.objectives.ratio import importance_ratio
from tepo_nemo.objectives.registry import register


@register("next_token")
class NextToken(Objective):
    """L = -logp, averaged over the mini-batch's tokens. Advantages and old statistics do not enter the loss.

    The metrics compare with the given old statistics; where there is no old policy, pass the current values.
    """

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        nothing = torch.zeros_like(tokens.mask)
        metrics = policy_metrics(
            tokens,
            ratio=importance_ratio(tokens, "token"),
            clipped=nothing,
            kl=divergence(tokens.logprobs - tokens.old_logprobs, "k3"),
            kl_mask=nothing,
        )
        return ObjectiveOutput(aggregate(-tokens.logprobs, tokens, totals, "token-mean"), metrics)
