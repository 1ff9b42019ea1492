"""What the embedded tasks share: splits by a hash of the problem, and prompt sets written as one folder."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path

from tepo_nemo.data.prompts import Prompt
from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import new_folder, to_json

SPLITS = {"train": range(75), "validation": range(75, 85), "test": range(85, 100)}  # per cent of a hash


def stable_hash(*parts: object) -> int:
    """64 bits that depend on the parts alone, on every machine and in every Python."""
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big")


def split_by_hash(operation: str, operands: Iterable[int]) -> str:
    """The split of a problem, always and for every seed: `operands` in another order are the same problem."""
    bucket = stable_hash(operation, *sorted(operands)) % 100
    return next(split for split, buckets in SPLITS.items() if bucket in buckets)


def check_sizes(task: str, sizes: Mapping[str, int]) -> None:
    """Raises UserError where a set of no prompts is asked for."""
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{task} data: {size} {name} prompts are asked for; ask for at least one")


def write_prompt_sets(folder: Path, sets: Mapping[str, Iterable[Prompt]]) -> None:
    """Writes NAME.jsonl for each set into a new folder, or nothing.

    Raises:
        UserError: the folder is not empty or cannot be written.
    """
    with new_folder(folder) as partial:
        for name, prompts in sets.items():
            lines = "".join(to_json(asdict(prompt)) + "\n" for prompt in prompts)
            (partial / f"{name}.jsonl").write_text(lines, encoding="utf-8")
