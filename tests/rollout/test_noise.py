"""Sampling noise against SplitMix64 in Python's own unbounded integers."""

import hashlib
import math

import pytest
import torch

from tepo_nemo.rollout.sampling import (
    log_exponential_noise,
    mix64,
    prompt_key,
    row_keys,
    stream_seed,
    uniform_draws,
)

CPU = torch.device("cpu")
GOLDEN = 0x9E3779B97F4A7C15
BITS = 0xFFFF_FFFF_FFFF_FFFF


def reference_mix(x: int) -> int:
    x &= BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & BITS
    return x ^ (x >> 31)


def reference_key(seed: int, prompt: int, sample: int) -> int:
    return reference_mix(reference_mix(prompt ^ (seed * GOLDEN & BITS)) + sample * GOLDEN)


def reference_log_noise(key: int, position: int, token: int) -> float:
    bits = reference_mix(reference_mix(key + position * GOLDEN) + token * GOLDEN) >> 32
    return math.log(-math.log1p(-(bits + 0.5) / 2**32))


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def test_mix64_gives_the_published_stream_of_splitmix64():
    """Output n of the generator with seed s is mix(s + n * golden); the values are those of seed 1234567."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = torch.tensor([signed(1234567 + n * GOLDEN & BITS) for n in range(1, 6)])
    assert [value & BITS for value in mix64(states).tolist()] == published


EDGES = [0, 1, 2**31, 2**32 - 1, 2**62 + 12345, 2**63 - 1]


@pytest.mark.parametrize("seed", EDGES)
def test_row_keys(seed):
    prompts = [prompt for prompt in EDGES for _ in (0, 1, 7)]
    samples = [0, 1, 7] * len(EDGES)
    expected = [signed(reference_key(seed, *row)) for row in zip(prompts, samples, strict=True)]
    assert row_keys(seed, prompts, samples, CPU).tolist() == expected


def test_noise():
    keys = [signed(reference_key(3, prompt, 2)) for prompt in EDGES]
    positions, tokens = [0, 1, 2, 100, 8191, 32767], [0, 1, 1000, 151_935]
    noise = log_exponential_noise(torch.tensor(keys), torch.tensor(positions), torch.tensor(tokens))
    assert noise.dtype == torch.float32 and noise.shape == (6, 4)
    expected = [[reference_log_noise(k, p, t) for t in tokens] for k, p in zip(keys, positions, strict=True)]
    torch.testing.assert_close(noise.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-6)


def test_draws():
    keys, positions = [signed(reference_key(3, prompt, 0)) for prompt in EDGES], [0, 1, 2, 100, 8191, 32767]
    draws = uniform_draws(torch.tensor(keys), torch.tensor(positions))
    assert draws.tolist() == [
        [(reference_mix(key + position * GOLDEN) >> 11) / 2**53 for position in positions] for key in keys
    ]


def test_draws_are_uniform():
    """Kolmogorov-Smirnov distance of 100,000 values; 1.95 / sqrt(n) is its 0.1% point."""
    draws = uniform_draws(row_keys(1, range(100), [0] * 100, CPU), torch.arange(1000)).flatten().sort().values
    assert 0 <= draws[0] and draws[-1] < 1
    steps = torch.arange(len(draws) + 1) / len(draws)
    distance = max((steps[1:] - draws).max(), (draws - steps[:-1]).max())
    assert distance < 1.95 / math.sqrt(len(draws))


def test_small_noise_is_exact():
    """The winner of the race has a small E: rounding there would favour some tokens."""
    noise = log_exponential_noise(torch.tensor([5]), torch.tensor([0]), torch.arange(400_000))[0]
    token = int(noise.argmin())
    assert noise[token] < math.log(1e-5)
    assert noise[token].item() == pytest.approx(reference_log_noise(5, 0, token), abs=2e-6)
    assert torch.isfinite(noise).all()


def test_noise_is_exponential():
    """Kolmogorov-Smirnov distance of 100,000 values from Exp(1); 1.95 / sqrt(n) is its 0.1% point."""
    noise = log_exponential_noise(torch.arange(50), torch.arange(50), torch.arange(2000)).double()
    ordered = (1 - (-noise.flatten().exp()).exp()).sort().values
    distance = (ordered - torch.linspace(0, 1, len(ordered), dtype=torch.float64)).abs().max()
    assert distance < 1.95 / math.sqrt(len(ordered))


@pytest.mark.parametrize(
    "text, key",
    [
        ("p0", 5097878332197156858),
        ("", 8238016292129134938),
        ("problème 7", 1579619280400418883),
        ("1/rollout/0/0", 4071009109521928361),
    ],
)
def test_prompt_key_is_the_same_in_every_version(text, key):
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).hexdigest()
    assert int(digest, 16) // 2 == key
    assert prompt_key(text) == key


def test_stream_seed_tells_seeds_purposes_and_steps_apart():
    assert stream_seed(1, "rollout/0", 0) == 4071009109521928361
    names = ("rollout/0", "rollout/1", "evaluation/a", "evaluation/b")
    seeds = {stream_seed(seed, name, step) for seed in range(12) for name in names for step in range(12)}
    assert len(seeds) == 12 * 4 * 12
    assert all(0 <= seed < 2**63 for seed in seeds)
