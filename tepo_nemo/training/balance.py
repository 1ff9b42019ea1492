"""Shares the responses of a mini-batch out over ranks and micro-batches, by their lengths alone.

Every rank holds all lengths and computes the shares of all, so that nothing is exchanged. Sums and means over
a mini-batch do not depend on the shares; padding and waiting do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# What a micro-batch costs beside its tokens (kernel launches, pipeline bubble), counted in tokens: padding
# below this is cheaper than another micro-batch.
MICRO_BATCH_COST = 64


@dataclass(frozen=True)
class MicroBatchLimits:
    """What a micro-batch holds at most."""

    responses: int | None  # None: any number
    tokens: int | None  # prompts and padding included; a longer response stands alone. None: any number
    length_multiple: int  # padded lengths are multiples of this
    packed: bool = False  # sequences stand one after the other, so that none is padded


def estimated_work(length: int, attention_length: int) -> float:
    """Floating-point operations of a sequence, in units of a token's without attention.

    Args:
        attention_length: at which attention costs as much as all else; 12 hidden sizes h for a GPT layer,
            which has 24 h^2 operations a token and, causal, 2 h for the square of the length.
    """
    return length * (1 + length / attention_length)


def share_out(
    lengths: Sequence[int], ranks: int, limits: MicroBatchLimits, attention_length: int
) -> list[list[list[int]]]:
    """Indices of `lengths` by rank and micro-batch: ranks of equal work, micro-batches of similar lengths.

    All ranks get the same number of micro-batches; where a rank has too few responses for that, some are
    empty. The longest stand first.

    Args:
        lengths: positions of each sequence.
        attention_length: see `estimated_work`.
    """
    rounded = [length if limits.packed else _round_up(length, limits.length_multiple) for length in lengths]
    shares = _balance([estimated_work(length, attention_length) for length in rounded], ranks)
    split = [_split(share, rounded, limits) for share in shares]
    count = max(1, *map(len, split))
    return [_split_further(micro_batches, count) for micro_batches in split]


def _round_up(length: int, multiple: int) -> int:
    return max(1, math.ceil(length / multiple)) * multiple


def _balance(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Shares of nearly equal work: by falling work, each to the rank with the least so far (Graham 1969)."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        rank = min(range(ranks), key=lambda rank: (loads[rank], len(shares[rank])))
        shares[rank].append(index)
        loads[rank] += work[index]
    return shares


def _split(share: Sequence[int], lengths: Sequence[int], limits: MicroBatchLimits) -> list[list[int]]:
    """Micro-batches, with the least of padded tokens and their own cost, of a share sorted by falling length.

    By dynamic programming over where a micro-batch ends; its first response is its longest.
    """
    least, start_of_last = [0.0], [0]
    for end in range(1, len(share) + 1):
        best, best_start = math.inf, end - 1
        own_tokens = 0
        for start in range(end - 1, -1, -1):
            own_tokens += lengths[share[start]]
            responses = end - start
            tokens = own_tokens if limits.packed else responses * lengths[share[start]]
            if responses > 1 and (
                (limits.responses is not None and responses > limits.responses)
                or (limits.tokens is not None and tokens > limits.tokens)
            ):
                break  # a longer run is larger still
            cost = least[start] + tokens + MICRO_BATCH_COST
            if cost < best:
                best, best_start = cost, start
        least.append(best)
        start_of_last.append(best_start)
    micro_batches, end = [], len(share)
    while end > 0:
        micro_batches.append(list(share[start_of_last[end] : end]))
        end = start_of_last[end]
    return micro_batches[::-1]


def _split_further(micro_batches: list[list[int]], count: int) -> list[list[int]]:
    """`count` micro-batches: the one with most responses is halved until there are as many."""
    micro_batches = list(micro_batches)
    while len(micro_batches) < count:
        largest = max(range(len(micro_batches)), key=lambda index: len(micro_batches[index]), default=None)
        if largest is None or len(micro_batches[largest]) < 2:
            micro_batches.append([])
            continue
        whole = micro_batches[largest]
        half = len(whole) // 2
        micro_batches[largest : largest + 1] = [whole[:half], whole[half:]]
    return micro_batches
