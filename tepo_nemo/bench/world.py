"""The process group of a benchmark: gloo ranks that are one tensor-parallel group of Megatron."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tepo_nemo.bench.memory import in_child

_TIMEOUT = timedelta(minutes=5)
_POLL_S = 0.01


def start_group(store: dist.Store | None = None) -> dist.ProcessGroup:
    """Join the other ranks (RANK, WORLD_SIZE; without a store also MASTER_ADDR, MASTER_PORT)."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from megatron.core import parallel_state  # after the stand-ins for CUDA

    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    return parallel_state.get_tensor_model_parallel_group()


def in_child_group(function: Callable[[dist.ProcessGroup], Any], file: Path) -> Any:
    """Run `function(group)` in forks of all ranks that meet in `file`; this rank's result."""

    def child() -> Any:
        ranks = int(os.environ["WORLD_SIZE"])
        store = dist.FileStore(str(file), ranks)
        result = function(start_group(store))
        # A rank that ended while another one is still in a collective would break it.
        store.add("done", 1)
        while store.add("done", 0) < ranks:
            time.sleep(_POLL_S)
        return result

    return in_child(child)
