"""Answers of a policy to the problems of a benchmark, graded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tepo_nemo.rollout.batch import ScoredBatch, TokenizedPrompt
from tepo_nemo.rollout.generate import generate
from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.rollout.sampling import stream_seed
from tepo_nemo.rollout.scoring import Grader


@dataclass(frozen=True)
class EvaluationSet:
    """Problems and how they are answered."""

    name: str
    prompts: Sequence[TokenizedPrompt]
    samples: int  # answers a problem
    temperature: float  # 0 is greedy


def evaluate(
    infer: Callable[[GenerationRequest], Generation],
    grader: Grader,
    evaluation: EvaluationSet,
    *,
    seed: int,
    max_response_length: int,
    prompts_at_once: int | None = None,
) -> Iterator[ScoredBatch]:
    """Answer and grade every problem of a set, in batches of `prompts_at_once` (None: all) in their order.

    The noise depends on the seed, the set and the problem alone, so that two policies (or one before and
    after training) are compared under common random numbers, and a part of the set is answered as in the
    whole. A batch is graded while the next one is generated.
    """
    rollouts = generate(
        infer,
        evaluation.prompts,
        samples=evaluation.samples,
        seed=stream_seed(seed, f"evaluation/{evaluation.name}", 0),
        temperature=evaluation.temperature,
        max_response_length=max_response_length,
        prompts_at_once=prompts_at_once,
    )
    graded: Callable[[], ScoredBatch] | None = None
    for batch in rollouts:
        started = grader.submit(batch)
        if graded is not None:
            yield graded()
        graded = started
    if graded is not None:
        yield graded()
