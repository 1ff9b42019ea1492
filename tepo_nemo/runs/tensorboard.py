"""TensorBoard events, without torch or TensorFlow."""

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.summary import Writer
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """Writes every metric of a step as a scalar of the same name.

    Args:
        folder: of the event files, also those of earlier processes of the run.
        after: the run goes on after this step; what earlier processes wrote of later ones is not shown.
    """

    def __init__(self, folder: Path, after: int = 0):
        # The second and later ones of these are taken for restarts, so that the first process writes one too.
        session = EventFileWriter(str(folder), filename_suffix=".session")
        session.add_event(
            Event(step=after + 1, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        )
        session.close()
        self._writer = Writer(str(folder))

    def add(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Adds one step and flushes it."""
        for key, value in metrics.items():
            if key != "step":
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
