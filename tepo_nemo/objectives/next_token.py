"""Next-token prediction: the supervised warm start before reinforcement learning."""

from tepo_nemo.objectives.aggregation import aggregate
from tepo_nemo.objectives.contract import MinibatchTotals, Objective, ObjectiveOutput, TokenBatch
from tepo_nemo.objectives.metrics import policy_metrics
from tepo_nemo.objectives.registry import register


@register("next_token")
class NextToken(Objective):
    """L = -logp, averaged over the mini-batch's tokens. Advantages and old statistics do not enter the loss.

    The metrics compare with the given old statistics; where there is no old policy, pass the current values.
    """

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        loss = aggregate(-tokens.logprobs, tokens, totals, "token-mean")
        return ObjectiveOutput(loss, policy_metrics(tokens))
