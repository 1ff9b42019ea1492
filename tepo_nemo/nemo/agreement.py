"""Work that may fail on one rank and must then fail on all, so that none waits for the others for ever."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist


class RankError(Exception):
    """Something has failed on a rank; the text is the first failure. Raised on all ranks."""


def agree(error: Exception | None) -> None:
    """Called by all ranks. Raises RankError on all of them where one has an error."""
    texts = gather_objects(None if error is None else describe(error))
    for rank, text in enumerate(texts):
        if text is not None:
            raise RankError(text if len(texts) == 1 else f"{text} (rank {rank})") from error


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
    """One line; the system's own words where a file is at the bottom of it."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those during whose handling it was raised: PyTorch's hide that the disk is full."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__
