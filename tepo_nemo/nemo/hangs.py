"""Ranks that wait for one which never comes: they give up, say which one it is, and show where each stands.

A collective operation gives up after `trainer.collective_timeout` by itself: gloo raises, NCCL ends the
process. What is here turns that into a line that names the missing rank, and writes the stacks of all ranks
to their logs shortly before. The NCCL side has never run.
"""

import faulthandler
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

# Of the timeout: a rank that hangs must have written its stack before the others pull it down.
_STACK_AFTER = 0.8
_REPORT_S = 5.0  # for all ranks to notice
_KEY = "tepo_nemo/gave_up/{rank}"
_SIGNS = ("Timed out waiting", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


class HungRankError(RuntimeError):
    """A rank hangs or is gone; the text names it. Raised on the ranks that have waited for it."""


class StackWatch:
    """Writes the stacks of all threads of this process to its log when it stands still.

    Args:
        timeout_s: of a collective operation.
    """

    def __init__(self, timeout_s: float) -> None:
        self._after_s = _STACK_AFTER * timeout_s

    def moved(self) -> None:
        """This rank has come to a next piece of work; wait from now."""
        faulthandler.dump_traceback_later(self._after_s)

    def stop(self) -> None:
        """Watch no longer."""
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def naming_hung_ranks() -> Iterator[None]:
    """Turn what a collective operation raises where a rank is missing into a HungRankError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistBackendError) and not any(sign in str(error) for sign in _SIGNS):
            raise
        missing = _ranks_that_have_not_noticed()
        if not missing:
            raise
        who = " and ".join(f"rank {rank}" for rank in missing)
        raise HungRankError(
            f"{who} did not come to a collective operation, and hangs or is gone "
            "(trainer.collective_timeout); where every rank stood is in its log"
        ) from error


def _ranks_that_have_not_noticed() -> list[int]:
    """The ranks that do not say, within `_REPORT_S`, that they have given up too."""
    store, ranks = dist.distributed_c10d._get_default_store(), range(dist.get_world_size())
    deadline = time.monotonic() + _REPORT_S
    try:
        store.set(_KEY.format(rank=dist.get_rank()), "")
        while True:
            missing = [rank for rank in ranks if not store.check([_KEY.format(rank=rank)])]
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(0.1)
    except RuntimeError:
        return [0]  # its process keeps the store
