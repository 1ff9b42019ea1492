"""The folder through which weights go from the trainer to the servers."""

import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import new_folder

_PREFIX = "weights_"


@dataclass(frozen=True)
class Weights:
    """A version of the weights: a folder of Hugging Face."""

    version: str  # no other run has one of this name
    folder: Path


class Handover:
    """Writes one version after the other; what a reader finds is whole.

    Args:
        folder: of this run alone. Versions that lie there are of a run that was killed, and are removed.

    Raises:
        UserError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = uuid.uuid4().hex[:8]
        self._count = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._remove_but(None)
        except OSError as error:
            raise UserError(
                f"rollout.server.handover_folder={folder}: cannot be used ({error.strerror}); choose another"
            ) from error

    def write(self, fill: Callable[[Path], None]) -> Weights:
        """Make the next version.

        Args:
            fill: writes the files into an empty folder, which takes its name only afterwards.
        """
        self._count += 1
        version = f"{_PREFIX}{self._run}_{self._count:06d}"
        with new_folder(self._folder / version) as partial:
            fill(partial)
        return Weights(version, self._folder / version)

    def keep_only(self, weights: Weights) -> None:
        """Remove all other versions, once nobody reads them any more."""
        self._remove_but(weights.folder)

    def _remove_but(self, kept: Path | None) -> None:
        for pattern in (f"{_PREFIX}*", f".{_PREFIX}*.partial"):
            for path in self._folder.glob(pattern):
                if path != kept:
                    shutil.rmtree(path)
