"""From answers of servers to what the trainer gets."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tepo_nemo.rollout.protocol import Generation, RolloutError
from tepo_nemo.rollout.server.completions import Answer

LOG = logging.getLogger(__name__)


def to_generation(answers: Sequence[Answer], *, vocab_size: int, stop_token: int) -> Generation:
    """The responses in the order of the answers, at least one.

    A response with a token that only pads the vocabulary becomes one of length 0, which is neither graded nor
    trained on.

    Args:
        vocab_size: of the true vocabulary.

    Raises:
        RolloutError: no response is of the vocabulary.
    """
    known = [max(answer.tokens) < vocab_size for answer in answers]
    if not any(known):
        raise RolloutError(
            f"all {len(answers)} responses have tokens beyond the vocabulary of {vocab_size}: that of the "
            "servers' model is another"
        )
    if not all(known):
        LOG.warning(
            "%d of %d responses are left out: they have a token that only pads the vocabulary",
            known.count(False),
            len(known),
        )
    lengths = [len(answer.tokens) if of_it else 0 for answer, of_it in zip(answers, known, strict=True)]
    finished = [answer.finished and of_it for answer, of_it in zip(answers, known, strict=True)]
    return Generation(
        tokens=_rows([answer.tokens for answer in answers], lengths, stop_token).long(),
        lengths=torch.tensor(lengths),
        finished=torch.tensor(finished),
        logprobs=_rows([answer.logprobs for answer in answers], lengths, 0.0).float(),
    )


def _rows(values: Sequence[Sequence[float]], lengths: Sequence[int], padding: float) -> Tensor:
    """[N, T] float64, which holds every token id; columns past a length are `padding`."""
    rows = [
        torch.tensor(row[:length], dtype=torch.float64) for row, length in zip(values, lengths, strict=True)
    ]
    return pad_sequence(rows, batch_first=True, padding_value=padding)
