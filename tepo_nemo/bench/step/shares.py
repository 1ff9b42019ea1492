"""How a step of the paper's size is shared out: counted, since 512 long responses are no work for a CPU."""

from typing import NamedTuple

from tepo_nemo.bench.step.passes import imbalance, padding_fraction
from tepo_nemo.bench.step.workload import Workload
from tepo_nemo.training.balance import MicroBatchLimits, estimated_work, share_out

PAPER = Workload("wide", "skewed", prompts=64, responses_per_prompt=8, updates=8, median_length=400)
RANKS = (1, 2, 8)  # data-parallel
_LIMITS = MicroBatchLimits(responses=None, tokens=16384, length_multiple=1)  # as shipped
_ATTENTION_LENGTH = 12 * 3584  # of a 7B model


class Shares(NamedTuple):
    """Of all updates of a step."""

    ranks: int
    micro_batches: float  # of a rank and update
    padding: float
    padding_to_longest: float  # every response as wide as the step's longest
    imbalance: float  # by which the busiest rank of each update exceeds the mean, padding included
    imbalance_of_arrival: float  # where each rank takes an equal number of responses as they come


def count_shares(work: Workload, ranks: int) -> Shares:
    """What `share_out` makes of the mini-batches of a step."""
    lengths = [
        prompt + length - 1
        for prompt, row in zip(work.prompt_lengths(), work.limits, strict=True)
        for length in row
    ]
    size = len(lengths) // work.updates
    loads: list[list[float]] = [[] for _ in range(ranks)]
    loads_of_arrival: list[list[float]] = [[] for _ in range(ranks)]
    passed = micro_batches = 0
    for start in range(0, len(lengths), size):
        update = lengths[start : start + size]
        shares = share_out(update, ranks, _LIMITS, _ATTENTION_LENGTH)
        for rank, of_rank in enumerate(shares):
            shapes = [(len(micro), max(update[index] for index in micro)) for micro in of_rank if micro]
            passed += sum(rows * longest for rows, longest in shapes)
            micro_batches += len(of_rank)
            loads[rank].append(sum(rows * _work(longest) for rows, longest in shapes))
            arrived = update[rank * size // ranks : (rank + 1) * size // ranks]
            loads_of_arrival[rank].append(sum(map(_work, arrived)))
    return Shares(
        ranks=ranks,
        micro_batches=micro_batches / work.updates / ranks,
        padding=padding_fraction(passed, sum(lengths)),
        padding_to_longest=padding_fraction(len(lengths) * max(lengths), sum(lengths)),
        imbalance=imbalance(loads),
        imbalance_of_arrival=imbalance(loads_of_arrival),
    )


def _work(length: int) -> float:
    return estimated_work(length, _ATTENTION_LENGTH)
