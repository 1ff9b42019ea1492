"""The one form of all-gather that the other modules use."""

import torch.distributed as dist
from torch import Tensor


def gather_stacked(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[...] of each rank, equal in shape -> [ranks, ...] in rank order, on every rank; without gradient."""
    tensor = tensor.detach().contiguous()
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    if tensor.numel() > 0:
        dist.all_gather(list(gathered), tensor, group=group)
    return gathered
