"""Responses out of a server's answers, counted by hand."""

import pytest
import torch

from tepo_nemo.rollout.protocol import RolloutError
from tepo_nemo.rollout.server.completions import Answer
from tepo_nemo.rollout.server.generation import to_generation

FULL = Answer([5, 6, 7], [-0.5, -1.0, -0.25], False)
ENDED = Answer([2], [-3.0], True)
PADDING = Answer([5, 2, 17, 2], [-1.0, -1.0, -9.0, -1.0], True)


def test_rows_are_padded_and_keep_their_order() -> None:
    found = to_generation([ENDED, FULL], vocab_size=17, stop_token=2)
    assert torch.equal(found.tokens, torch.tensor([[2, 2, 2], [5, 6, 7]]))
    assert torch.equal(found.lengths, torch.tensor([1, 3]))
    assert torch.equal(found.finished, torch.tensor([True, False]))
    assert torch.equal(found.logprobs, torch.tensor([[-3.0, 0.0, 0.0], [-0.5, -1.0, -0.25]]))
    assert found.tokens.dtype == found.lengths.dtype == torch.int64
    assert found.logprobs.dtype == torch.float32


def test_large_ids_keep_every_digit() -> None:
    largest = 2**31 - 3
    found = to_generation([Answer([largest, 2], [-1.0, -1.0], True)], vocab_size=2**31, stop_token=2)
    assert found.tokens.tolist() == [[largest, 2]]


def test_a_token_that_pads_the_vocabulary_leaves_no_response(caplog: pytest.LogCaptureFixture) -> None:
    found = to_generation([FULL, PADDING], vocab_size=17, stop_token=2)
    assert found.lengths.tolist() == [3, 0] and found.finished.tolist() == [False, False]
    assert found.tokens[1].tolist() == [2, 2, 2] and found.logprobs[1].tolist() == [0, 0, 0]
    assert "1 of 2 responses are left out" in caplog.text


def test_another_vocabulary_is_told() -> None:
    with pytest.raises(RolloutError, match="all 2 responses have tokens beyond the vocabulary of 5"):
        to_generation([FULL, PADDING], vocab_size=5, stop_token=2)
