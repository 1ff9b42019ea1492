"""Work that may fail on one rank and must then fail on all, so that none waits for the others for ever."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist


class RankFailed(Exception):
    """Something has failed on a rank; the text is the first failure. Raised on all ranks."""


def agree(error: Exception | None) -> None:
    """Called by all ranks. Raises RankFailed on all of them where one has an error."""
    texts = gather_objects(None if error is None else describe(error))
    for rank, text in enumerate(texts):
        if text is not None:
            raise RankFailed(text if len(texts) == 1 else f"{text} (rank {rank})") from error


@contextmanager
def agreed() -> Iterator[None]:
    """All ranks run the block, or none is past it: see `agree`. Nothing inside may wait for other ranks."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    agree(error)


def gather_objects(value: object) -> Sequence:
    """The value of each rank, on all ranks."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def describe(error: Exception) -> str:
    """One line; the system's own words where it is a failure of a file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
