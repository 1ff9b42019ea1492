"""Megatron's `torch_dist` format: sharded tensors in a folder, that any layout can read.

Megatron-core plans what each rank writes. The writing is ours: in threads, where Megatron-core starts
processes that a killed run would leave behind, and in steps between which a rank can say that it has failed.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue, SimpleQueue
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.planner import LoadPlan

from tepo_nemo.nemo.agreement import agreed

_BACKEND, _VERSION = "torch_dist", 1


class _Planner(TorchDistSaveShardedStrategy):
    """Megatron-core's strategy up to the plan."""

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret):
        _, metadata, ranks = save_state_dict_ret
        return writer, metadata, ranks


class ShardedSave:
    """One folder on its way to the disk: planned when it is made, then `write`, then `finish`.

    Args:
        state: sharded tensors; whatever else is in it must be the same on all ranks.
        folder: there already, on all ranks, and empty.
        copied: write a copy of now, so that the state may change meanwhile.
    """

    def __init__(self, state: ShardedStateDict, folder: Path, *, copied: bool) -> None:
        self._folder = folder
        sharded, self._common = save_preprocess(state)
        strategy = FullyParallelSaveStrategyWrapper(
            _Planner(_BACKEND, _VERSION), parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        # Its own queue is a process.
        with patch.object(filesystem_async, "_results_queue", SimpleQueue()):
            self._writer, self._metadata, self._ranks = strategy.async_save(sharded, folder)
        self._writer.results_queue = SimpleQueue() if self._writer.write_buckets else None
        torch.cuda.synchronize()  # the copies to the host are complete
        if copied and not torch.cuda.is_available():
            self._writer.write_buckets = [
                (path, key, (blobs, [(item, tensor.clone()) for item, tensor in tensors]))
                for path, key, (blobs, tensors) in self._writer.write_buckets
            ]

    @property
    def bytes(self) -> int:
        """What this rank writes, but for some headers."""
        return sum(
            tensor.numel() * tensor.element_size()
            for _, _, (_, tensors) in self._writer.write_buckets
            for _, tensor in tensors
        )

    def write(self) -> list[Path]:
        """Write and sync this rank's files; they are returned. Waits for no other rank. Raises OSError."""
        buckets = self._writer.write_buckets
        if not buckets:
            return []
        with ThreadPoolExecutor(len(buckets)) as threads:
            results = list(threads.map(self._write_bucket, range(len(buckets))))
        self._writer.results_queue.put(dict(enumerate(results)))
        return [path for path, _, _ in buckets]

    def _write_bucket(self, number: int) -> list:
        results, running = SimpleQueue(), Queue()
        running.put(number)
        bucket = self._writer.write_buckets[number]
        self._writer.write_preloaded_data(number, bucket, results, running, True)
        _, result = results.get()
        if isinstance(result, Exception):
            raise result
        return result

    def finish(self) -> None:
        """Write down where everything is; called by all ranks after all have written."""
        results = self._ranks.gather_object(self._writer.retrieve_write_results())
        with agreed():
            if dist.get_rank() == 0:
                TorchCommonSaveStrategy(_BACKEND, _VERSION).save_common(self._common, self._folder)
                self._writer.finish(self._metadata, results)
                save_config(CheckpointingConfig(_BACKEND, _VERSION), self._folder)


def load_sharded(state: ShardedStateDict, folder: Path) -> StateDict:
    """What `ShardedSave` wrote, for this rank's place in whatever layout; called by all ranks."""
    with any_vocabulary_padding():
        return dist_checkpointing.load(state, str(folder))


@contextmanager
def any_vocabulary_padding() -> Iterator[None]:
    """Let weights be loaded whose vocabulary was padded for another tensor-parallel size.

    Megatron-core asks for this itself: it compares all shapes but those of the embedding and the output
    layer, and fills rows that the file lacks with zeros. Recent versions of PyTorch then compare sizes once
    more and know of no exception.
    """
    create_local_plan = MCoreLoadPlanner.create_local_plan

    def with_own_sizes(planner: MCoreLoadPlanner) -> LoadPlan:
        planner._validate_global_shapes(planner.metadata, planner.shapes_validation_sharded_tensors)
        saved = planner.metadata.state_dict_metadata
        for name, tensor in planner.state_dict.items():
            if name in saved and hasattr(saved[name], "size"):
                saved[name].size = tensor.size()
        return create_local_plan(planner)

    with patch.object(MCoreLoadPlanner, "create_local_plan", with_own_sizes):
        yield
