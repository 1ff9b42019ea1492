"""The same draws whatever number of ranks shares the vocabulary, and on each of them."""

import pytest
import torch
import torch.distributed as dist

from tepo_nemo.rollout.sampling import row_keys, sample_tokens

CASES = [(temperature, dtype) for temperature in (1.0, 0.6, 0) for dtype in (torch.float32, torch.bfloat16)]
VOCAB_SIZE, PADDED = (
    11,
    16,
)  # with 4 ranks the last one has padding alone, with 2 half of the second is padding


def make_logits() -> torch.Tensor:
    """Random rows, then ties across shards, forbidden tokens, and a shard without any that may be drawn."""
    logits = torch.randn(400, PADDED, generator=torch.Generator().manual_seed(0))
    logits[:, VOCAB_SIZE:] = 30.0  # would win if it could
    logits[300:320, :VOCAB_SIZE] = 1.0
    logits[320:340, 2] = logits[320:340, 9] = 5.0
    logits[340:360, 4:8] = float("-inf")
    logits[360:380, :8] = float("-inf")
    return logits


def draw(rank: int, world_size: int, temperature: float, dtype: torch.dtype, local: bool = False):
    """What this rank draws from its shard of the vocabulary."""
    width = PADDED // world_size
    keys = row_keys(4, [row // 8 for row in range(400)], [row % 8 for row in range(400)], torch.device("cpu"))
    return sample_tokens(
        make_logits().to(dtype)[:, rank * width : (rank + 1) * width],
        keys,
        torch.arange(400) % 13,
        temperature=temperature,
        vocab_size=VOCAB_SIZE,
        group=None if local else dist.group.WORLD,
    )


def draw_all(rank: int, world_size: int):
    return {case: draw(rank, world_size, *case) for case in CASES}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_draws_do_not_depend_on_the_number_of_ranks(worlds, size):  # faults 12, 26
    ranks = worlds(size).run(draw_all)
    for temperature, dtype in CASES:
        whole_tokens, whole_logprobs = draw(0, 1, temperature, dtype, local=True)
        _, first_logprobs = ranks[0][temperature, dtype]
        for results in ranks:
            tokens, logprobs = results[temperature, dtype]
            assert torch.equal(tokens, whole_tokens)
            torch.testing.assert_close(logprobs, whole_logprobs, rtol=0, atol=1e-6)
            assert torch.equal(logprobs, first_logprobs)  # to the bit on every rank
        assert whole_tokens.max() < VOCAB_SIZE
        exact = (make_logits().to(dtype)[:, :VOCAB_SIZE].double() / (temperature or 1)).log_softmax(1)
        expected = exact.gather(1, whole_tokens[:, None])[:, 0]
        torch.testing.assert_close(first_logprobs.double(), expected, rtol=1e-6, atol=2e-6)
        if temperature == 0:  # the lowest id among equals, wherever it lives
            assert (tokens[300:320] == 0).all() and (tokens[320:340] == 2).all()
            assert (tokens[360:380] >= 8).all()
