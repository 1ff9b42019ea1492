"""GPG: Group Policy Gradient (arXiv 2504.02546)."""

from tepo_nemo.objectives.aggregation import Aggregation, aggregate
from tepo_nemo.objectives.contract import MinibatchTotals, Objective, ObjectiveOutput, TokenBatch
from tepo_nemo.objectives.metrics import policy_metrics
from tepo_nemo.objectives.registry import register


@register("gpg")
class Gpg(Objective):
    """The plain policy gradient, L = -A logp: no ratio, no clip, no KL.

    Its scale alpha is part of the advantage, see `advantage.group_advantages`.
    """

    aggregation: Aggregation

    def __call__(self, tokens: TokenBatch, totals: MinibatchTotals) -> ObjectiveOutput:
        loss = -tokens.advantages * tokens.logprobs
        return ObjectiveOutput(aggregate(loss, tokens, totals, self.aggregation), policy_metrics(tokens))
