"""The contract between the trainer and whatever generates responses.

Shapes: ``N`` responses asked for, ``T`` the longest response among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class RolloutError(RuntimeError):
    """What generates, or what it returned, cannot be relied on. It ends the run."""


@dataclass(frozen=True)
class GenerationRequest:
    """N responses to generate, and everything that their sampling noise may depend on. N may be 0.

    Two requests with equal rows give equal responses, whatever the batch they are generated in.
    """

    prompt_tokens: Sequence[Sequence[int]]  # N prompts (a group repeats its prompt), each at least one token
    prompt_keys: Sequence[int]  # N, from `sampling.prompt_key`
    sample_indices: Sequence[int]  # N, number of the response among those to its prompt
    seed: int  # from `sampling.stream_seed`: run seed, purpose and step
    temperature: float  # 0 takes the most likely token
    max_response_lengths: Sequence[int]  # N, each at least 1; tokens, the stop token included

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def rows(self, start: int, stop: int) -> "GenerationRequest":
        """The request for rows `start` to `stop` alone."""
        return replace(
            self,
            prompt_tokens=self.prompt_tokens[start:stop],
            prompt_keys=self.prompt_keys[start:stop],
            sample_indices=self.sample_indices[start:stop],
            max_response_lengths=self.max_response_lengths[start:stop],
        )

    def select(self, rows: Sequence[int]) -> "GenerationRequest":
        """The request for the given rows, in the given order."""
        return replace(
            self,
            prompt_tokens=[self.prompt_tokens[row] for row in rows],
            prompt_keys=[self.prompt_keys[row] for row in rows],
            sample_indices=[self.sample_indices[row] for row in rows],
            max_response_lengths=[self.max_response_lengths[row] for row in rows],
        )


@dataclass(frozen=True)
class Generation:
    """N responses in the order of the request.

    A response of length 0 is none: what came back was no sequence of the vocabulary. It is not finished, it
    is neither graded nor trained on, and what stands in its columns means nothing.
    """

    tokens: Tensor  # [N, T] int64; columns past a response's length hold any valid token id
    lengths: Tensor  # [N] int64, the stop token counts
    finished: Tensor  # [N] bool: ended by the stop token (True) or cut at the length limit (False)
    logprobs: Tensor  # [N, T] fp32, of the sampled tokens at the sampling temperature (at 1 when greedy)

    def select(self, rows: Tensor) -> "Generation":
        """The responses of the given rows, in the given order; T stays."""
        return Generation(
            tokens=self.tokens[rows],
            lengths=self.lengths[rows],
            finished=self.finished[rows],
            logprobs=self.logprobs[rows],
        )


class RolloutBackend(Protocol):
    """Generates responses under the current weights.

    ``generate`` is called by all ranks of a model-parallel group with the same request, and returns the
    same result on each of them. Each copy of the model has a share of the rows, but where the backend
    ``takes_all_rows``: then all ranks call it with all rows.
    """

    takes_all_rows: bool

    def prepare(self) -> None:
        """Take over the current weights (refit) and the memory that generation needs."""

    def generate(self, request: GenerationRequest) -> Generation:
        """Generate one response a row of the request."""

    def release(self) -> None:
        """Give the memory back to training."""


def no_responses() -> Generation:
    """The answer to a request of no rows."""
    return Generation(
        tokens=torch.zeros(0, 0, dtype=torch.int64),
        lengths=torch.zeros(0, dtype=torch.int64),
        finished=torch.zeros(0, dtype=torch.bool),
        logprobs=torch.zeros(0, 0),
    )


def concatenate_generations(parts: Sequence[Generation]) -> Generation:
    """Join generations row-wise, padding tokens to the longest."""
    width = max(part.tokens.shape[1] for part in parts)

    def widen(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))

    return Generation(
        tokens=torch.cat([widen(part.tokens) for part in parts]),
        lengths=torch.cat([part.lengths for part in parts]),
        finished=torch.cat([part.finished for part in parts]),
        logprobs=torch.cat([widen(part.logprobs) for part in parts]),
    )
