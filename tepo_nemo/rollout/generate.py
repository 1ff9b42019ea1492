"""From prompts to batches of responses."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

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
    prompts_at_once: int | None = None,
) -> Iterator[RolloutBatch]:
    """`samples` responses to each prompt, in batches of whole prompts; a prompt's responses stand together.

    A prompt that comes twice (a small data set, the edge of an epoch) is two groups, and is answered with
    other noise the second time. A batch is generated when it is asked for; responses do not depend on how
    they are batched.

    Args:
        infer: generates a whole request, the same on every rank.
        seed: of this purpose and step, from `sampling.stream_seed`.
        max_response_length: of every response; tokens, the stop token included.
        prompts_at_once: of a batch; None for all.
    """
    rows = [prompt for prompt in prompts for _ in range(samples)]
    request = GenerationRequest(
        prompt_tokens=[prompt.tokens for prompt in rows],
        prompt_keys=[prompt_key(prompt.prompt.id) for prompt in rows],
        sample_indices=_number_by_prompt(rows),
        seed=seed,
        temperature=temperature,
        max_response_lengths=[max_response_length] * len(rows),
    )
    size = prompts_at_once or len(prompts)
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        yield RolloutBatch(
            prompts=batch,
            groups=torch.arange(len(batch)).repeat_interleave(samples),
            samples=torch.arange(samples).repeat(len(batch)),
            generation=infer(request.rows(start * samples, (start + len(batch)) * samples)),
        )


def _number_by_prompt(rows: Sequence[TokenizedPrompt]) -> list[int]:
    """How many earlier rows ask the same prompt."""
    seen: Counter[str] = Counter()
    numbers = []
    for row in rows:
        numbers.append(seen[row.prompt.id])
        seen[row.prompt.id] += 1
    return numbers
