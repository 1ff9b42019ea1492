"""What only the last pipeline stage knows, made known to every stage."""

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def broadcast_from_last_stage(
    tensor: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    group: dist.ProcessGroup | None,
    last_rank: int,
) -> Tensor:
    """The last stage's tensor, on every stage, without gradient.

    Args:
        tensor: the tensor on the last stage; not looked at on the others.
        shape, dtype, device: those of the tensor, known to every stage.
        group: the pipeline-parallel ranks, or None where there is one stage.
        last_rank: global rank of the last stage of this group.
    """
    if group is None or dist.get_rank() == last_rank:
        assert tensor is not None and tuple(tensor.shape) == tuple(shape), (tensor, shape)
        assert tensor.dtype == dtype, (tensor.dtype, dtype)
        received = tensor.detach().to(device).contiguous()
    else:
        received = torch.empty(tuple(shape), dtype=dtype, device=device)
    if group is not None and received.numel() > 0:
        dist.broadcast(received, src=last_rank, group=group)
    return received


def broadcast_object_from_last_stage(obj: T | None, group: dist.ProcessGroup | None, last_rank: int) -> T:
    """The last stage's object (pickled), on every stage; `obj` of the others is not looked at."""
    if group is None:
        return obj
    box = [obj]
    dist.broadcast_object_list(box, src=last_rank, group=group)
    return box[0]
