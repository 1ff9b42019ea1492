"""The toy task: arithmetic problems of graded difficulty, with held-out problems that were never trained on.

Which split a problem belongs to is decided by a hash of the problem alone, whatever seed, size or mixture is
asked for: no training set shares a problem with any test set, and 37+85 and 85+37 are one problem. The seed
chooses which problems of a split are taken and in which order. Warm start and RL both read train.jsonl.
"""

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType

from tepo_nemo.data.prompts import Prompt
from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import new_folder, to_json

TOY_CHARACTERS = "0123456789+-="  # every character of a prompt or an answer
SPLITS = {"train": range(75), "validation": range(75, 85), "test": range(85, 100)}  # per cent of a hash


@dataclass(frozen=True)
class Level:
    """Problems `a+b=` or `a-b=` with operands of `digits` digits, zeros in front included."""

    name: str
    operator: str
    digits: int
    terms: int = 2


LEVELS = {
    1: Level("add1", "+", digits=1),
    2: Level("add2", "+", digits=2),
    3: Level("sub2", "-", digits=2),
    4: Level("sum2", "+", digits=2, terms=3),  # a million problems: going through them takes some seconds
}
TWO_DIGIT_ADDITION = MappingProxyType({2: 1.0})


def write_toy_data(
    folder: Path,
    *,
    seed: int,
    train: int = 4608,
    validation: int = 256,
    test: int = 512,
    mixture: Mapping[int, float] = TWO_DIGIT_ADDITION,
) -> None:
    """Writes train.jsonl, validation.jsonl and test.jsonl into a new folder: all of them, or nothing.

    Args:
        train, validation, test: number of prompts of each split, all different.
        mixture: level -> share, in any unit; the same in each split.

    Raises:
        UserError: the folder is not empty, a level is unknown, a size or share is not positive, or a split
            has fewer problems of a level than are asked for.
    """
    sizes = {"train": train, "validation": validation, "test": test}
    _check(sizes, mixture)
    counts = {split: _counts(size, mixture) for split, size in sizes.items()}
    prompts: dict[str, list[Prompt]] = {split: [] for split in sizes}
    for number in mixture:
        problems = _problems_by_split(LEVELS[number])
        for split in sizes:
            prompts[split] += _choose(problems[split], number, split, counts[split][number], seed)
    with new_folder(folder) as partial:
        for split, chosen in prompts.items():
            chosen.sort(key=lambda prompt: _hash(seed, prompt.id))  # mixes the levels
            lines = "".join(to_json(asdict(prompt)) + "\n" for prompt in chosen)
            (partial / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def split_of(level: Level, operands: tuple[int, ...]) -> str:
    """The split that a problem belongs to, always and for every seed."""
    problem = sorted(operands) if level.operator == "+" else operands
    bucket = _hash(level.operator, *problem) % 100
    return next(split for split, buckets in SPLITS.items() if bucket in buckets)


def _check(sizes: Mapping[str, int], mixture: Mapping[int, float]) -> None:
    for split, size in sizes.items():
        if size < 1:
            raise UserError(f"toy data: {size} {split} prompts are asked for; ask for at least one")
    if not mixture:
        raise UserError("toy data: the mixture is empty; give at least one level a share")
    for level, share in mixture.items():
        if level not in LEVELS:
            raise UserError(f"toy level {level!r} is unknown; choose from {sorted(LEVELS)}")
        if not 0 < share < math.inf:
            raise UserError(f"toy level {level} has the share {share}; give a positive one or leave it out")


def _problems_by_split(level: Level) -> dict[str, list[tuple[int, ...]]]:
    problems: dict[str, list[tuple[int, ...]]] = {split: [] for split in SPLITS}
    for operands in itertools.product(range(10**level.digits), repeat=level.terms):
        problems[split_of(level, operands)].append(operands)
    return problems


def _choose(problems: list[tuple[int, ...]], number: int, split: str, count: int, seed: int) -> list[Prompt]:
    if count > len(problems):
        raise UserError(
            f"toy data: {split} has {len(problems)} prompts of level {number}, {count} are asked for; "
            f"ask for fewer {split} prompts or give the level a smaller share"
        )
    chosen = heapq.nsmallest(count, problems, key=lambda operands: _hash(seed, number, *operands))
    return [_to_prompt(number, operands) for operands in chosen]


def _to_prompt(number: int, operands: tuple[int, ...]) -> Prompt:
    level = LEVELS[number]
    first, *others = operands
    return Prompt(
        id=f"toy-{level.name}-" + "-".join(f"{operand:03d}" for operand in operands),
        prompt=level.operator.join(f"{operand:0{level.digits}d}" for operand in operands) + "=",
        gold=str(first + sum(others) if level.operator == "+" else first - sum(others)),
        metadata={"level": number},
    )


def _counts(size: int, mixture: Mapping[int, float]) -> dict[int, int]:
    """`size` split by the shares of the mixture; the largest remainders get what rounding leaves."""
    exact = {level: size * share / sum(mixture.values()) for level, share in mixture.items()}
    counts = {level: int(value) for level, value in exact.items()}
    by_remainder = sorted(exact, key=lambda level: counts[level] - exact[level])
    for level in by_remainder[: size - sum(counts.values())]:
        counts[level] += 1
    return counts


def _hash(*parts: object) -> int:
    """64 bits that depend on the parts alone, on every machine and in every Python."""
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big")
