"""Sums and rows over the data-parallel ranks.

Both collectives first compare what the ranks bring along, since a mismatch would otherwise hang or mix up
values; every rank then raises the same error.
"""

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_nemo.parallel.gather import gather_stacked


def sum_over_ranks(values: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Sum of each 0-d value over the ranks, as float64, in one all-reduce for all of them.

    The order of the keys may differ between ranks. Results are in the order of `values`.

    Raises:
        ValueError: on every rank, if the ranks do not have the same keys; names those that some rank lacks.
    """
    assert all(value.ndim == 0 for value in values.values())
    if group is None:
        return {name: value.detach().double() for name, value in values.items()}
    names = sorted(values)
    if len({tuple(row) for row in _gather_integers([_fingerprint(names)], group)}) > 1:
        raise ValueError(f"ranks sum different values: {_differences(names, group)}")
    if not names:
        return {}
    device = _device(group)
    total = torch.stack([values[name].detach().to(device, torch.float64) for name in names])
    dist.all_reduce(total, group=group)
    by_name = dict(zip(names, total.unbind(), strict=True))
    return {name: by_name[name] for name in values}


def gather_ragged_rows(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Rows of all ranks, [sum of n_r, ...] in rank order, on every rank, without gradient.

    Args:
        rows: [n_r, ...]; n_r may differ between ranks and be 0, the rest of the shape and the dtype may not.

    Raises:
        ValueError: on every rank, if the shapes of a row or the dtypes differ.
    """
    if group is None:
        return rows.detach()
    kind = f"{list(rows.shape[1:])} {rows.dtype}"
    counts, kinds = zip(*_gather_integers([len(rows), _fingerprint([kind])], group), strict=True)
    if len(set(kinds)) > 1:
        raise ValueError(f"ranks gather rows of different kinds: {', '.join(_gather_objects(kind, group))}")
    padded = rows.new_zeros((max(counts), *rows.shape[1:]), device=_device(group))
    padded[: len(rows)] = rows.detach()
    parts = [part[:count] for part, count in zip(gather_stacked(padded, group), counts, strict=True)]
    return torch.cat(parts).to(rows.device)


def _fingerprint(words: list[str]) -> int:
    """63 bits that are equal on all ranks for equal words (Python's own hash differs between processes)."""
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8]) >> 1


def _gather_integers(values: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """The values of each rank, in rank order; as many on every rank."""
    return gather_stacked(torch.tensor(values, dtype=torch.int64, device=_device(group)), group).tolist()


def _gather_objects(value: object, group: dist.ProcessGroup) -> list:
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _differences(names: list[str], group: dist.ProcessGroup) -> str:
    per_rank = [set(other) for other in _gather_objects(names, group)]
    lacking = {
        name: [rank for rank, own in enumerate(per_rank) if name not in own]
        for name in set().union(*per_rank)
    }
    return "; ".join(
        f"{name!r} is missing on rank(s) {ranks}" for name, ranks in sorted(lacking.items()) if ranks
    )


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where the group's backend takes tensors from."""
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
