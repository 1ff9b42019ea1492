"""The toy task: sums of two two-digit numbers, graded by how often one has to carry, and a careless student.

Which split a problem belongs to is decided by a hash of the problem alone, whatever seed, size or mixture is
asked for: no training set shares a problem with any test set, and 37+85 and 85+37 are one problem. The seed
chooses which problems of a split are taken and in which order.

The warm start is taught from `warm_start.jsonl`: problems of the training split with the answers of a student
who forgets four carries out of five. A model taught by it adds well and is mostly wrong wherever a carry is
due, greedily as well as sampled; what reinforcement learning has to do is to give the habit up.
"""

import heapq
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tepo_nemo.data.problem_sets import SPLITS, check_sizes, split_by_hash, stable_hash, write_prompt_sets
from tepo_nemo.data.prompts import Prompt
from tepo_nemo.errors import UserError

TOY_CHARACTERS = "0123456789+-="  # of the tokenizer
LEVELS = (0, 1, 2)  # carries
MIXTURE: Mapping[int, float] = MappingProxyType({0: 2.0, 1: 5.0, 2: 3.0})  # level -> share, in any unit
FORGOTTEN = 0.8  # share of the carries that the student forgets

Operands = tuple[int, int]


def write_toy_data(
    folder: Path,
    *,
    seed: int,
    train: int = 4608,
    validation: int = 256,
    test: int = 512,
    warm_start: int = 40_000,
    mixture: Mapping[int, float] = MIXTURE,
) -> None:
    """Writes train.jsonl, validation.jsonl, test.jsonl and warm_start.jsonl into a new folder, or nothing.

    Args:
        train, validation, test: number of prompts of each split, all different.
        warm_start: number of (problem, careless answer) pairs; problems recur, with other mistakes.
        mixture: level (number of carries) -> share; the same in each split.

    Raises:
        UserError: the folder is not empty, a level is unknown, a size or share is not positive, or a split
            has fewer problems of a level than are asked for.
    """
    sizes = {"train": train, "validation": validation, "test": test}
    check_sizes("toy", {**sizes, "warm start": warm_start})
    _check_mixture(mixture)
    problems = _problems_by_split()
    prompts = {split: _choose(problems[split], split, size, mixture, seed) for split, size in sizes.items()}
    prompts["warm_start"] = _careless_prompts(problems["train"], warm_start, seed)
    write_prompt_sets(folder, prompts)


def split_of(operands: Operands) -> str:
    """The split that a problem belongs to, always and for every seed."""
    return split_by_hash("+", operands)


def careless_sum(operands: Operands, forgotten: tuple[bool, bool]) -> int:
    """The sum, column by column, where the carry of the ones and of the tens may be forgotten."""
    total, carry = 0, 0
    for column, forgets in enumerate((*forgotten, False)):
        digits = sum(operand // 10**column % 10 for operand in operands) + carry
        total += digits % 10 * 10**column
        carry = 0 if forgets else digits // 10
    return total


def carries(operands: Operands) -> int:
    """How often one has to carry in the written addition: the level of a problem."""
    ones = sum(operand % 10 for operand in operands) >= 10
    return ones + (sum(operand // 10 for operand in operands) + ones >= 10)


def _check_mixture(mixture: Mapping[int, float]) -> None:
    if not mixture:
        raise UserError("toy data: the mixture is empty; give at least one level a share")
    for level, share in mixture.items():
        if level not in LEVELS:
            raise UserError(f"toy level {level!r} is unknown; choose from {list(LEVELS)}")
        if not 0 < share < math.inf:
            raise UserError(f"toy level {level} has the share {share}; give a positive one or leave it out")


def _problems_by_split() -> dict[str, list[Operands]]:
    problems: dict[str, list[Operands]] = {split: [] for split in SPLITS}
    for operands in itertools.product(range(100), repeat=2):
        problems[split_of(operands)].append(operands)
    return problems


def _choose(
    problems: list[Operands], split: str, size: int, mixture: Mapping[int, float], seed: int
) -> list[Prompt]:
    chosen: list[Operands] = []
    for level, count in _counts(size, mixture).items():
        candidates = [operands for operands in problems if carries(operands) == level]
        if count > len(candidates):
            raise UserError(
                f"toy data: {split} has {len(candidates)} prompts of level {level}, {count} are asked for; "
                f"ask for fewer {split} prompts or give the level a smaller share"
            )
        chosen += heapq.nsmallest(count, candidates, key=lambda operands: stable_hash(seed, *operands))
    chosen.sort(key=lambda operands: stable_hash(seed, "order", *operands))  # mixes the levels
    return [_to_prompt(operands, answer=sum(operands)) for operands in chosen]


def _careless_prompts(problems: list[Operands], count: int, seed: int) -> list[Prompt]:
    prompts = []
    for number in range(count):
        operands = problems[stable_hash(seed, "problem", number) % len(problems)]
        ones, tens = (
            stable_hash(seed, column, number) % 1000 < 1000 * FORGOTTEN for column in ("ones", "tens")
        )
        prompt = _to_prompt(operands, answer=careless_sum(operands, (ones, tens)))
        prompts.append(Prompt(f"{prompt.id}-{number:05d}", prompt.prompt, prompt.gold, prompt.metadata))
    return prompts


def _to_prompt(operands: Operands, answer: int) -> Prompt:
    first, second = operands
    return Prompt(
        id=f"toy-{first:02d}-{second:02d}",
        prompt=f"{first:02d}+{second:02d}=",
        gold=str(answer),
        metadata={"level": carries(operands)},
    )


def _counts(size: int, mixture: Mapping[int, float]) -> dict[int, int]:
    """`size` split by the shares of the mixture; the largest remainders get what rounding leaves."""
    exact = {level: size * share / sum(mixture.values()) for level, share in mixture.items()}
    counts = {level: int(value) for level, value in exact.items()}
    by_remainder = sorted(exact, key=lambda level: counts[level] - exact[level])
    for level in by_remainder[: size - sum(counts.values())]:
        counts[level] += 1
    return counts
