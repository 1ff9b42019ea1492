"""Draws tokens from vocabulary-parallel logits with noise that is a function, not a state.

The noise of a token depends on (seed, prompt, sample, position, token id) alone. From the same weights,
rollouts therefore do not depend on tensor, pipeline or data parallelism nor on the split into batches
(but for ties within rounding), and a resumed run needs no generator state.

Sampling is an exponential race: with E_v independent Exp(1) variables, argmax_v (logit_v/T - log E_v) is
distributed as softmax(logits/T) (the Gumbel-max trick; Maddison et al. 2014, arXiv 1411.0030). Each rank
races over its own vocabulary shard and one all-gather of a few scalars a row decides.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_nemo.parallel.gather import gather_stacked

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def prompt_key(prompt_id: str) -> int:
    """A 63-bit key of a prompt's id, the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "big") >> 1


def stream_seed(seed: int, purpose: str, step: int) -> int:
    """A 63-bit seed for one purpose ("rollout", "selection", "evaluation/NAME") at one step of a run."""
    return prompt_key(f"{seed}/{purpose}/{step}")


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors (arithmetic modulo 2^64)."""
    x = (x ^ _shift_right(x, 30)) * _signed(_MULTIPLIERS[0])
    x = (x ^ _shift_right(x, 27)) * _signed(_MULTIPLIERS[1])
    return x ^ _shift_right(x, 31)


def row_keys(
    seed: int, prompt_keys: Sequence[int], sample_indices: Sequence[int], device: torch.device
) -> Tensor:
    """Keys of N responses, int64 [N]."""
    prompts = torch.tensor(prompt_keys, dtype=torch.int64, device=device)
    samples = torch.tensor(sample_indices, dtype=torch.int64, device=device)
    keys = mix64(prompts ^ _signed(seed * _GOLDEN))
    return mix64(keys + samples * _signed(_GOLDEN))


def log_exponential_noise(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """log E for E ~ Exp(1), fp32 [N, V].

    Args:
        keys: int64 [N] from `row_keys`.
        positions: int64 [N], index of the token in its response.
        token_ids: int64 [V], global vocabulary ids.
    """
    token_keys = mix64(keys + positions * _signed(_GOLDEN))
    bits = _shift_right(mix64(token_keys[:, None] + token_ids[None, :] * _signed(_GOLDEN)), 32)
    # The winner has a small E, so the uniform variable must be exact near 0: -log1p(-u), never -log(u).
    uniform = (bits.float() + 0.5) * 2.0**-32
    return (-torch.log1p(-uniform)).log()


def uniform_draws(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64 [N, T], of keys int64 [N] (`row_keys`) and positions int64 [T]."""
    bits = mix64(keys[:, None] + positions * _signed(_GOLDEN))
    return _shift_right(bits, 11).double() * 2.0**-53


def sample_tokens(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row; the same result on every rank of `group`.

    Args:
        logits: [N, V_local], this rank's shard (columns ``rank * V_local`` and up); padding columns at and
            past `vocab_size` are never drawn.
        keys, positions: see `log_exponential_noise`.
        temperature: 0 takes the most likely token (the lowest id among equals).
        vocab_size: size of the true vocabulary.
        group: tensor-parallel group, None for one rank.

    Returns:
        tokens int64 [N], and their log-probabilities fp32 [N] at `temperature` (at 1 when it is 0). A row
        with a NaN among its logits gets some token of the vocabulary and the log-probability NaN.
    """
    first = (0 if group is None else dist.get_rank(group)) * logits.shape[1]
    ids = torch.arange(first, first + logits.shape[1], device=logits.device)
    scaled = logits.float() / (temperature or 1.0)
    scaled = scaled.masked_fill(ids >= vocab_size, float("-inf"))
    scores = scaled - log_exponential_noise(keys, positions, ids) if temperature > 0 else scaled

    best_score = scores.amax(dim=1)
    # The lowest id among equal scores: argmax promises no order.
    best_id = torch.where(scores == best_score[:, None], ids, torch.iinfo(torch.int64).max).amin(dim=1)
    best_id = best_id.clamp(max=first + logits.shape[1] - 1)  # NaN equals nothing
    best_logit = scaled.gather(1, (best_id - first)[:, None]).squeeze(1)
    log_normalizer = scaled.logsumexp(dim=1)
    # float64 holds every token id exactly, so that one message carries all four.
    local = torch.stack([best_score.double(), best_id.double(), best_logit.double(), log_normalizer.double()])
    shards = local[None] if group is None else gather_stacked(local, group)
    top = shards[:, 0].amax(dim=0)
    tokens = torch.where(shards[:, 0] == top, shards[:, 1], float("inf")).amin(dim=0)
    tokens = tokens.clamp(max=vocab_size - 1).long()
    logit = torch.where(shards[:, 1] == tokens.double(), shards[:, 2], float("-inf")).amax(dim=0)
    return tokens, (logit - shards[:, 3].logsumexp(dim=0)).float()
