"""What makes a step fast, each thing switched off in turn.

Where the product has no switch, the plain way stands here and takes the place of the other one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import torch

from tepo_nemo.bench.step.names import (
    ALL,
    BALANCE,
    COMPACTION,
    FIRST,
    FUSED,
    OVERLAP,
    PREFIX,
    RESPONSES_ONLY,
)
from tepo_nemo.bench.step.workload import Workload
from tepo_nemo.nemo import actor as actor_module
from tepo_nemo.nemo.rollout import megatron as rollout_module
from tepo_nemo.nemo.rollout.decoding import Decoding
from tepo_nemo.rollout.batch import RolloutBatch, ScoredBatch, concatenate_scored
from tepo_nemo.rollout.scoring import Grader
from tepo_nemo.training import minibatch, preparation
from tepo_nemo.training.balance import MicroBatchLimits
from tepo_nemo.training.batch import MiniBatch
from tepo_nemo.training.policy import Policy
from tepo_nemo.training.statistics import with_old_statistics

GRADING_S = 0.005
_PLAIN_MICRO_BATCH = 8  # responses


@dataclass(frozen=True)
class Variant:
    """One way to take our step.

    Args:
        overrides: of the configuration.
        plain: entered around each step; puts plain ways in the place of fast ones.
        pad_to_longest: pads every micro-batch to the step's longest sequence.
        run_to_longest: ended responses stay in the batch until the longest has ended.
        grading_s: seconds that the grader waits for each response, as it would for a verifier.
    """

    overrides: tuple[str, ...] = ()
    plain: Callable[[], AbstractContextManager] = nullcontext
    pad_to_longest: bool = False
    run_to_longest: bool = False
    grading_s: float = 0.0

    def on_top_of(self, other: "Variant") -> "Variant":
        """This variant where `other` is how steps are taken otherwise; `other` has nothing plain."""
        return replace(self, overrides=other.overrides + self.overrides, grading_s=other.grading_s)


@contextmanager
def in_order_of_arrival() -> Iterator[None]:
    """Equal numbers of responses to ranks and micro-batches, as they come."""

    def share_out(
        lengths: Sequence[int], ranks: int, limits: MicroBatchLimits, attention_length: int
    ) -> list[list[list[int]]]:
        share = len(lengths) // ranks
        size = limits.responses or share
        return [
            [
                list(range(start, min(start + size, (rank + 1) * share)))
                for start in range(rank * share, (rank + 1) * share, size)
            ]
            for rank in range(ranks)
        ]

    with mock.patch.object(minibatch, "share_out", share_out):
        yield


@contextmanager
def statistics_of_all() -> Iterator[None]:
    """A forward-only pass over every mini-batch, the first one included."""

    def of_all(policy: Policy, mini_batches: Sequence[MiniBatch], *, first_too: bool) -> list[MiniBatch]:
        return with_old_statistics(policy, mini_batches, first_too=True)

    with mock.patch.object(preparation, "with_old_statistics", of_all):
        yield


@contextmanager
def output_layer_of_all() -> Iterator[None]:
    """Every position enters the output layer, those of prompts and padding too."""
    of_responses = actor_module.response_logprobs_and_entropy

    def of_all(model, hidden, places, target, **options):
        everywhere = torch.arange(hidden.shape[0] * hidden.shape[1], device=places.device)
        targets = torch.zeros_like(everywhere).index_copy(0, places, target)
        values = of_responses(model, hidden, everywhere, targets, **options)
        return tuple(value.index_select(0, places) for value in values)

    with mock.patch.object(actor_module, "response_logprobs_and_entropy", of_all):
        yield


@contextmanager
def prompts_read_again() -> Iterator[None]:
    """Every response of a group reads the prompt for itself."""

    class Unshared(Decoding):
        def _join(self, rows):
            tokens = torch.tensor([self._request.prompt_tokens[row] for row in rows], device=self._device)
            logits = self._forward(tokens, len(self._responding), 0)
            self._stopped = torch.cat([self._stopped, self._stopped.new_zeros(len(rows))])
            self._set_responding(self._responding + rows)
            return logits

    with mock.patch.object(rollout_module, "Decoding", Unshared):
        yield


@contextmanager
def graded_afterwards() -> Iterator[None]:
    """Each batch of responses is graded before the next one is generated."""

    def score(grader: Grader, batches: Iterable[RolloutBatch]) -> ScoredBatch:
        return concatenate_scored([grader.submit(batch)() for batch in batches])

    with mock.patch.object(Grader, "score", score):
        yield


def in_batches_of(responses: int) -> Variant:
    """Several batches of responses, whose grading takes about as long as a verifier's."""
    return Variant((f"rollout.batch_size={responses}",), grading_s=GRADING_S)


def longest_sequence(workload: Workload) -> int:
    """Positions of the step's longest response with its prompt."""
    return max(
        prompt + length - 1
        for prompt, limits in zip(workload.prompt_lengths(), workload.limits, strict=True)
        for length in limits
    )


def _all_off(variants: Sequence[Variant]) -> Variant:
    @contextmanager
    def plain() -> Iterator[None]:
        with ExitStack() as stack:
            for variant in variants:
                stack.enter_context(variant.plain())
            yield

    overrides = tuple(override for variant in variants for override in variant.overrides)
    return Variant(overrides, plain, pad_to_longest=True, run_to_longest=True)


_LEVERS = {
    BALANCE: Variant(
        (f"trainer.micro_batch_size={_PLAIN_MICRO_BATCH}", "trainer.micro_batch_tokens=null"),
        in_order_of_arrival,
        pad_to_longest=True,
    ),
    FIRST: Variant(plain=statistics_of_all),
    RESPONSES_ONLY: Variant(plain=output_layer_of_all),
    FUSED: Variant(("trainer.fused_output_layer=false",)),
    COMPACTION: Variant(run_to_longest=True),
    PREFIX: Variant(plain=prompts_read_again),
}
LEVERS = _LEVERS | {ALL: _all_off(list(_LEVERS.values())), OVERLAP: Variant(plain=graded_afterwards)}
"""By the name of what is switched off."""
