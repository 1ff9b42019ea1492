"""Where among the ranks a number is not finite."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def first_ranks_not_finite(
    values: Mapping[str, Tensor | float | None], group: dist.ProcessGroup | None
) -> dict[str, int]:
    """The values that are not finite on some rank, each with the first rank of the group that has it so.

    One all-reduce of an integer a value, and one wait for the device; the same on every rank.

    Args:
        values: 0-d each, None where a rank does not have it; the same keys in the same order on every rank.
        group: None for one rank alone.
    """
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    device = torch.device("cuda" if group is not None and "nccl" in dist.get_backend(group) else "cpu")
    # A maximum keeps the largest, and the first rank shall win.
    found = torch.stack([~_is_finite(value).to(device) * (size - rank) for value in values.values()])
    if group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return {name: size - weight for name, weight in zip(values, found.tolist(), strict=True) if weight}


def _is_finite(value: Tensor | float | None) -> Tensor:
    if value is None:
        return torch.tensor(True)
    return torch.as_tensor(value).detach().isfinite()
