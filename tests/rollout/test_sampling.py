"""What is drawn: the distribution, the log-probabilities, and what the draws depend on."""

import math

import pytest
import torch

from tepo_nemo.rollout.sampling import prompt_key, row_keys, sample_tokens, stream_seed

CPU = torch.device("cpu")
LOGITS = torch.tensor([1.5, -0.5, 0.0, 2.0, -3.0, 0.7])


def keys_of(samples, prompt="p0", seed=11):
    return row_keys(seed, [prompt_key(prompt)] * len(samples), samples, CPU)


def draw(logits, keys, positions=0, *, temperature=1.0, vocab_size=None):
    positions = torch.as_tensor(positions).expand(len(keys))
    rows = logits.expand(len(keys), -1) if logits.dim() == 1 else logits
    return sample_tokens(
        rows, keys, positions, temperature=temperature, vocab_size=vocab_size or rows.shape[1], group=None
    )


def assert_distributed(counts, probabilities):
    """Chi-square, four standard deviations above its mean. The draws are fixed: always or never."""
    expected = counts.sum() * probabilities
    freedom = counts.numel() - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_softmax(temperature):  # faults 17
    tokens, _ = draw(LOGITS, keys_of(range(50_000)), temperature=temperature)
    probabilities = (LOGITS.double() / temperature).softmax(0)
    assert_distributed(torch.bincount(tokens, minlength=6).double(), probabilities)
    with pytest.raises(AssertionError):  # the test sees the difference between the two temperatures
        other = (LOGITS.double() / (1.6 - temperature)).softmax(0)
        assert_distributed(torch.bincount(tokens, minlength=6).double(), other)


@pytest.mark.parametrize("what", ["positions", "samples", "prompts", "seeds", "steps"])
def test_draws_are_independent_across(what):
    """The joint counts of the draws of two neighbours against the product of their distributions."""
    rows = 40_000
    seed = stream_seed(1, "rollout/0", 0)
    first = draw(LOGITS, keys_of(range(rows), seed=seed))[0]
    second = {
        "positions": lambda: draw(LOGITS, keys_of(range(rows), seed=seed), 1),
        "samples": lambda: draw(LOGITS, keys_of(range(1, rows + 1), seed=seed)),
        "prompts": lambda: draw(LOGITS, keys_of(range(rows), "p1", seed)),
        "seeds": lambda: draw(LOGITS, keys_of(range(rows), seed=stream_seed(2, "rollout/0", 0))),
        "steps": lambda: draw(LOGITS, keys_of(range(rows), seed=stream_seed(1, "rollout/0", 1))),
    }[what]()[0]
    probabilities = LOGITS.double().softmax(0)
    counts = torch.bincount(first * 6 + second, minlength=36).double()
    assert_distributed(counts, torch.outer(probabilities, probabilities).flatten())


def test_draws_of_many_prompts_at_one_position_are_independent():
    """As above, between consecutive prompts rather than consecutive samples."""
    keys = row_keys(5, [prompt_key(f"p{number}") for number in range(30_001)], [0] * 30_001, CPU)
    tokens, _ = draw(LOGITS, keys)
    probabilities = LOGITS.double().softmax(0)
    counts = torch.bincount(tokens[:-1] * 6 + tokens[1:], minlength=36).double()
    assert_distributed(counts, torch.outer(probabilities, probabilities).flatten())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logprob_is_that_of_the_drawn_token(temperature, dtype):
    """Greedy answers are told at temperature 1."""
    logits = (8 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))).to(dtype)
    tokens, logprobs = draw(logits, keys_of(range(64)), temperature=temperature)
    expected = (logits.double() / (temperature or 1.0)).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=5e-6)


def test_bf16_logits_draw_what_their_values_draw():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    for temperature in (1.0, 0.6, 0):
        tokens, logprobs = draw(logits, keys_of(range(200)), temperature=temperature)
        same_tokens, same_logprobs = draw(logits.float(), keys_of(range(200)), temperature=temperature)
        assert torch.equal(tokens, same_tokens) and torch.equal(logprobs, same_logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0])
def test_padding_columns_are_never_drawn(temperature):  # faults 12
    logits = torch.full((5000, 8), 50.0)
    logits[:, :5] = LOGITS[:5]
    tokens, logprobs = draw(logits, keys_of(range(5000)), temperature=temperature, vocab_size=5)
    assert tokens.max() < 5
    expected = (LOGITS[:5].double() / (temperature or 1.0)).log_softmax(0)[tokens]
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("temperature", [1.0, 0])
def test_a_forbidden_token_is_never_drawn(temperature):  # faults 11
    logits = torch.tensor([float("-inf"), 0.3, float("-inf"), -0.2])
    tokens, logprobs = draw(logits, keys_of(range(2000)), temperature=temperature)
    assert set(tokens.tolist()) == ({1, 3} if temperature else {1})
    expected = torch.tensor([0.3, -0.2], dtype=torch.float64).log_softmax(0)[(tokens == 3).long()]
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-6)


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    tokens, _ = draw(logits, keys_of(range(3)), temperature=0)
    assert tokens.tolist() == [1, 0, 4]


def test_greedy_does_not_depend_on_the_noise():
    logits = torch.randn(100, 30, generator=torch.Generator().manual_seed(2))
    for seed in range(3):
        tokens, _ = draw(logits, keys_of(range(100), seed=seed), temperature=0)
        assert torch.equal(tokens, logits.argmax(1))


def test_order_and_batch_split_do_not_change_the_draws():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(60, 40, generator=generator)
    keys = row_keys(9, [prompt_key(f"p{row // 4}") for row in range(60)], [row % 4 for row in range(60)], CPU)
    positions = torch.arange(60) % 7
    whole = draw(logits, keys, positions)
    order = torch.randperm(60, generator=generator)
    shuffled = draw(logits[order], keys[order], positions[order])
    assert torch.equal(shuffled[0], whole[0][order])
    torch.testing.assert_close(shuffled[1], whole[1][order], rtol=0, atol=1e-6)
    for size in (1, 7, 59):
        parts = [
            draw(logits[at : at + size], keys[at : at + size], positions[at : at + size])
            for at in range(0, 60, size)
        ]
        assert torch.equal(torch.cat([tokens for tokens, _ in parts]), whole[0])
        torch.testing.assert_close(
            torch.cat([logprobs for _, logprobs in parts]), whole[1], rtol=0, atol=1e-6
        )


def test_no_rows():
    tokens, logprobs = draw(torch.zeros(0, 5), keys_of([]))
    assert tokens.shape == logprobs.shape == (0,)


def test_a_certain_token_is_always_drawn():
    logits = torch.tensor([0.0, 200.0, 0.0])
    for seed in range(5):
        tokens, logprobs = draw(logits, keys_of(range(1000), seed=seed))
        assert (tokens == 1).all() and (logprobs == 0).all()


def test_the_logits_are_left_alone():  # faults 13
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    draw(logits, keys_of(range(4)), temperature=0.6, vocab_size=5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_tells_so_and_leaves_the_others_alone(temperature):
    """No id out of range: the next forward would look it up."""
    logits = torch.randn(3, 8)
    keys = keys_of(range(3))
    tokens, logprobs = draw(logits, keys, temperature=temperature)
    broken = logits.clone()
    broken[1, 4] = float("nan")
    broken_tokens, broken_logprobs = draw(broken, keys, temperature=temperature)
    assert 0 <= broken_tokens[1] < 8 and broken_logprobs[1].isnan()
    assert broken_tokens[[0, 2]].tolist() == tokens[[0, 2]].tolist()
    assert broken_logprobs[[0, 2]].tolist() == logprobs[[0, 2]].tolist()
