"""The chain task: a sum of several digits by its running totals, of which the last one alone counts.

    prompt    7+8+5+9=
    response  7+8=15;15+5=20;20+9=29

Whoever errs in one step ends wrong, nearly always: the reward of a whole chain has to be traced to its steps.

Which split a problem belongs to is decided by a hash of its digits alone, in any order, whatever the seed.
Single steps (a total and a digit) recur across the splits: held out are the sums, not the steps.

The warm start is taught from `warm_start.jsonl`: sums of the training split with the chains of a careless
student, who forgets a due carry three times out of five, is off by one in a few of his other steps, and goes
on from what he has written. A model taught by it knows how a chain goes and is unsure of every step; what
reinforcement learning has to do is to make up its mind the right way, step by step.
"""

from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

from tepo_nemo.data.problem_sets import check_sizes, split_by_hash, stable_hash, write_prompt_sets
from tepo_nemo.data.prompts import Prompt
from tepo_nemo.errors import UserError

CHAIN_CHARACTERS = "0123456789+=;"  # of the tokenizer
OPERANDS = (4, 5, 6)  # digits of a sum, each from 1 to 9
FORGOTTEN = 0.6  # share of the due carries that the student forgets
OFF_BY_ONE = 0.05  # share of his other steps that come out one too high or one too low
LARGEST = 20_000  # prompts of a split; the smallest, test, has about 90,000 different ones

Operands = tuple[int, ...]


class Slip(NamedTuple):
    """What goes wrong in one step: the carry, where one is due, or else the total by `off_by`."""

    forgets: bool = False
    off_by: int = 0


def write_chain_data(
    folder: Path,
    *,
    seed: int,
    train: int = 4096,
    validation: int = 256,
    test: int = 256,
    warm_start: int = 40_000,
) -> None:
    """Writes train.jsonl, validation.jsonl, test.jsonl and warm_start.jsonl into a new folder, or nothing.

    Args:
        train, validation, test: number of prompts of each split, all different.
        warm_start: number of (problem, careless chain) pairs; problems recur, with other mistakes.

    Raises:
        UserError: the folder is not empty, or a size is not positive or a split's is above `LARGEST`.
    """
    sizes = {"train": train, "validation": validation, "test": test}
    check_sizes("chain", {**sizes, "warm start": warm_start})
    for split, size in sizes.items():
        if size > LARGEST:
            raise UserError(f"chain data: {size} {split} prompts are asked for; ask for at most {LARGEST}")
    sets = {
        split: [
            _to_prompt(operands, str(sum(operands)))
            for operands in islice(_draw_different(split, seed), size)
        ]
        for split, size in sizes.items()
    }
    sets["warm_start"] = [
        _to_prompt(operands, chain(operands, _slips(seed, number, len(operands) - 1)), f"-{number:05d}")
        for number, operands in enumerate(islice(_draw("train", f"{seed}/warm start"), warm_start))
    ]
    write_prompt_sets(folder, sets)


def split_of(operands: Operands) -> str:
    """The split that a problem belongs to, always and for every seed."""
    return split_by_hash("chain", operands)


def chain(operands: Operands, slips: Sequence[Slip]) -> str:
    """The running totals as they are written down, each step from the total written before it.

    Args:
        slips: one for each step; there is one step less than operands.
    """
    total, *others = operands
    steps = []
    for operand, slip in zip(others, slips, strict=True):
        written = total + operand
        if slip.forgets and carry_is_due(total, operand):
            written -= 10
        else:
            written += slip.off_by
        steps.append(f"{total}+{operand}={written}")
        total = written
    return ";".join(steps)


def carry_is_due(total: int, operand: int) -> bool:
    """Whether the ones of the two make ten or more."""
    return total % 10 + operand >= 10


def _draw(split: str, key: object) -> Iterator[Operands]:
    """Problems of a split without end, the same one now and then."""
    for number in count():
        size = OPERANDS[stable_hash(key, number) % len(OPERANDS)]
        operands = tuple(1 + stable_hash(key, number, place) % 9 for place in range(size))
        if split_of(operands) == split:
            yield operands


def _draw_different(split: str, seed: int) -> Iterator[Operands]:
    taken: set[Operands] = set()
    for operands in _draw(split, f"{seed}/{split}"):
        if operands not in taken:
            taken.add(operands)
            yield operands


def _slips(seed: int, number: int, steps: int) -> list[Slip]:
    """The slips of the student in the chain of this number."""
    slips = []
    for step in range(steps):
        forgets, off, high = (
            stable_hash(seed, purpose, number, step) for purpose in ("carry", "off", "high")
        )
        is_off = off % 1000 < 1000 * OFF_BY_ONE
        slips.append(Slip(forgets % 1000 < 1000 * FORGOTTEN, (1 if high % 2 else -1) * is_off))
    return slips


def _to_prompt(operands: Operands, gold: str, suffix: str = "") -> Prompt:
    digits = "".join(map(str, operands))
    return Prompt(f"chain-{digits}{suffix}", "+".join(digits) + "=", gold, {"level": len(operands)})
