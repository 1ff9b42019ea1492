"""MPI as the launcher starts it: a rank a process, and communicators that split."""

import torch.distributed as dist
from support.fake_trtllm.faults import Faults


class Session:
    """The ranks that share an engine, after `MpiComm.split`."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.group: dist.ProcessGroup | None = None

    def split(self, color: int, key: int) -> None:
        """Called by all ranks; those of one color are a group, in the order of their keys."""
        told: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
        dist.all_gather_object(told, (color, key, dist.get_rank()))
        for each in sorted({entry[0] for entry in told}):
            group = dist.new_group([rank for entry, _, rank in sorted(told) if entry == each])
            if each == color:
                self.group = group

    def rank(self) -> int:
        return dist.get_rank() if self.faults.mpi_rank is None else self.faults.mpi_rank


class Communicator:
    """mpi4py's: NeMo splits it, too, and nothing uses it afterwards."""

    def Split(self, color: int, key: int) -> "Communicator":  # noqa: N802  its name
        return Communicator()
