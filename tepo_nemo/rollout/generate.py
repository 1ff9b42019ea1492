"""From prompts to a batch of responses."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from tepo_nemo.rollout.batch import RolloutBatch, TokenizedPrompt
from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.rollout.sampling import prompt_key


def generate(
    infer: Callable[[GenerationRequest], Generation],
    prompts: Sequence[TokenizedPrompt],
    *,
    samples: int,
    seed: int,
    temperature: float,
    max_response_length: int,
) -> RolloutBatch:
    """`samples` responses to each prompt; a prompt's responses stand together.

    A prompt that comes twice (a small data set, the edge of an epoch) is two groups, and is answered with
    other noise the second time.

    Args:
        infer: generates a whole request, the same on every rank.
        seed: of this purpose and step, from `sampling.stream_seed`.
    """
    rows = [prompt for prompt in prompts for _ in range(samples)]
    request = GenerationRequest(
        prompt_tokens=[prompt.tokens for prompt in rows],
        prompt_keys=[prompt_key(prompt.prompt.id) for prompt in rows],
        sample_indices=_number_by_prompt(rows),
        seed=seed,
        temperature=temperature,
        max_response_length=max_response_length,
    )
    return RolloutBatch(
        prompts=prompts,
        groups=torch.arange(len(prompts)).repeat_interleave(samples),
        samples=torch.arange(samples).repeat(len(prompts)),
        generation=infer(request),
    )


def _number_by_prompt(rows: Sequence[TokenizedPrompt]) -> list[int]:
    """How many earlier rows ask the same prompt."""
    seen: Counter[str] = Counter()
    numbers = []
    for row in rows:
        numbers.append(seen[row.prompt.id])
        seen[row.prompt.id] += 1
    return numbers
