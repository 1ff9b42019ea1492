"""What an operation allocates, from PyTorch's dispatcher."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Bytes of each storage that an operation makes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        flat = torch.utils._pytree.tree_leaves((arguments, keywords))
        known = {leaf.untyped_storage().data_ptr() for leaf in flat if isinstance(leaf, torch.Tensor)}
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.sizes.append(leaf.untyped_storage().nbytes())
        return result
