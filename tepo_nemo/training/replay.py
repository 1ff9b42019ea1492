"""Trains on rollouts of an earlier run: a collector that reads in place of generating."""

from collections.abc import Mapping
from pathlib import Path

from tepo_nemo.errors import UserError
from tepo_nemo.training.collect import CollectedStep
from tepo_nemo.training.dumps import RolloutDump, find_dumps, read_dump
from tepo_nemo.training.timers import PhaseTimers


class RolloutReader:
    """Implements `Collector`; every rank reads the same files.

    Args:
        folders: of each step.
        timers: reading is counted as the rollout.
    """

    generates = False

    def __init__(self, folders: Mapping[int, Path], timers: PhaseTimers) -> None:
        self._folders = folders
        self._timers = timers

    def collect(self, step: int, consumed_prompts: int) -> CollectedStep:
        """See `Collector`; prompts are counted as the earlier run counted them."""
        with self._timers.phase("rollout"):
            return read_dump(self._folders[step + 1]).collected


def read_dumps(path: Path) -> dict[int, tuple[Path, RolloutDump]]:
    """By step, all dumps of `path`: see `find_dumps`.

    Raises UserError where one is broken or steps are missing in between.
    """
    dumps: dict[int, tuple[Path, RolloutDump]] = {}
    for folder in find_dumps(path):
        dump = read_dump(folder)
        if dumps and dump.step != max(dumps) + 1:
            raise UserError(
                f"replay={path}: {folder.name} is of step {dump.step} and follows step {max(dumps)} (give "
                "consecutive steps, or one of them)"
            )
        dumps[dump.step] = folder, dump
    return dumps
