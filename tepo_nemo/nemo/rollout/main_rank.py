"""Work that the main rank does for all, however long it takes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")
_WORD_S = 60.0  # between two words of the main rank; process groups give up after minutes of silence


def by_main_rank(work: Callable[[], T]) -> T:
    """What `work` returns on the main rank, on every rank. Called by all ranks; the others wait.

    Raises:
        What the work raises, on the main rank. The others are then ended by whoever has started them.
    """
    if dist.get_rank() != 0:
        while not (said := _tell(None)):
            pass
        return said[0]
    with ThreadPoolExecutor(1, thread_name_prefix="main-rank") as thread:
        future = thread.submit(work)
        while wait([future], timeout=_WORD_S).not_done:
            _tell([])
        return _tell([future.result()])[0]


def _tell(said: list[T] | None) -> list[T]:
    """The main rank's word, on every rank: empty while it works."""
    box = [said]
    dist.broadcast_object_list(box, src=0)
    return box[0]
