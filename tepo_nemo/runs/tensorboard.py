"""TensorBoard events, without torch or TensorFlow."""

from collections.abc import Mapping
from pathlib import Path

from tensorboard.summary import Writer


class TensorBoard:
    """Writes every metric of a step as a scalar of the same name."""

    def __init__(self, folder: Path):
        self._writer = Writer(str(folder))

    def add(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Adds one step and flushes it."""
        for key, value in metrics.items():
            if key != "step":
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
