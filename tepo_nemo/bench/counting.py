"""Exact counts: collectives and their bytes, and what autograd keeps for a backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Collective -> which of its arguments holds what this rank contributes.
_PAYLOAD = {
    "allreduce_": 0, "allreduce_coalesced_": 0, "broadcast_": 0, "reduce_": 0,
    "allgather_": 1, "_allgather_base_": 1, "allgather_into_tensor_coalesced_": 1, "gather_": 1,
    "reduce_scatter_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_tensor_coalesced_": 1, "scatter_": 1,
    "alltoall_": 1, "alltoall_base_": 1,
}  # fmt: skip


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of this rank while it is active, and the bytes that the rank puts into them.

    It sees the operators of torch.distributed, so it does not matter under which name they are called. What
    torch.compile has compiled runs uncompiled while it is active.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d" and (name := function._opname) in _PAYLOAD:
            self.calls += 1
            self.bytes += sum(tensor.nbytes for tensor in tensors_of(args[_PAYLOAD[name]]))
        return function(*args, **(kwargs or {}))


def tensors_of(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class SavedTensors:
    """The storages that autograd keeps for a backward."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no key is used twice

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage

    def take_bytes(self, inputs: Iterable[Tensor]) -> int:
        """Bytes of what is kept and is not one of the inputs; lets go of it."""
        own = {tensor.untyped_storage()._cdata for tensor in inputs}
        size = sum(storage.nbytes() for key, storage in self._storages.items() if key not in own)
        self._storages.clear()
        return size


@contextmanager
def saved_for_backward() -> Iterator[SavedTensors]:
    """What is saved while the block runs; `add` the tensors `held_by_nodes`, which no hook sees."""
    saved = SavedTensors()

    def pack(tensor: Tensor) -> Tensor:
        saved.add([tensor])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def held_by_nodes(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Tensors that autograd functions of a graph hold as attributes, where no hook sees them."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, held = set(nodes), []
    while nodes:
        node = nodes.pop()
        held += tensors_of(list(vars(node).values())) if hasattr(node, "__dict__") else []
        following = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= following
        nodes += following
    return held
