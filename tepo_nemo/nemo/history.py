"""What a run keeps of its earlier processes, beside the state of its trainer."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tepo_nemo.config.resume import fingerprint
from tepo_nemo.config.schema import Config
from tepo_nemo.data.prompts import fingerprint as prompts_fingerprint
from tepo_nemo.errors import UserError
from tepo_nemo.nemo.build import Host
from tepo_nemo.nemo.resume import Restored, find_newest, load_checkpoint, read_state
from tepo_nemo.nemo.saver import CheckpointSaver, Retention
from tepo_nemo.rollout.batch import TokenizedPrompt
from tepo_nemo.runs.checkpoints import CheckpointFolder
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import EVALUATION_PREFIX


class RunHistory:
    """Evaluations and seconds of a run, and what it was begun with.

    Args:
        started: when this process began to train, by `time.monotonic`.
    """

    def __init__(self, config: Config, prompts: Sequence[TokenizedPrompt], started: float) -> None:
        self._started = started
        self._config = config
        self._train_set = prompts_fingerprint(prompt.prompt for prompt in prompts)
        self._start = _size_of(config.model.restore_from_path)
        self._earlier_s = 0.0
        self.eval_before: Mapping[str, float] | None = None
        self.eval_after: Mapping[str, float] | None = None

    @property
    def wall_s(self) -> float:
        """Seconds of all processes, up to the checkpoint that the next one has gone on from."""
        return self._earlier_s + time.monotonic() - self._started

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "eval_before": self.eval_before,
            "wall_s": self.wall_s,
            "train_set": self._train_set,
            "start_bytes": self._start,
        }

    def go_on(self, host: Host, directory: RunDirectory) -> Restored | None:
        """Put the newest checkpoint that can be trusted in place; None where there is none. For all ranks.

        Raises UserError where none can be trusted, or the run was begun with other prompts or weights.
        """
        folder = CheckpointFolder(directory.checkpoints)
        found = find_newest(folder, fingerprint(self._config))
        if found.position is None:
            return None
        path = folder.of(found.position)
        begun = read_state(path)["run"]
        if begun["train_set"] != self._train_set:
            raise UserError(
                f"data.train={self._config.data.train}: is not what it was when the run began (restore it, "
                "or choose another output)"
            )
        if begun["start_bytes"] != self._start:
            raise UserError(
                f"model.restore_from_path={self._config.model.restore_from_path}: has {self._start} bytes, "
                f"and {begun['start_bytes']} when the run began (restore it, or choose another output)"
            )
        self._earlier_s, self.eval_before = begun["wall_s"], begun["eval_before"]
        restored = load_checkpoint(host, path)
        note = f"goes on from {directory.checkpoints.name}/{path.name}"
        return replace(restored, notes=[*found.notes, *restored.notes, note])

    def go_back(self, host: Host, directory: RunDirectory) -> dict[str, Any] | None:
        """Put the newest checkpoint of a whole step in place again; for all ranks. The trainer's state then.

        None where there is none that can be trusted.
        """
        folder = CheckpointFolder(directory.checkpoints)
        try:
            found = find_newest(folder, fingerprint(self._config), whole_steps=True)
        except UserError:
            return None
        return None if found.position is None else load_checkpoint(host, folder.of(found.position)).state


def make_saver(
    config: Config,
    host: Host,
    directory: RunDirectory,
    history: RunHistory,
    report: Callable[[str], None],
) -> CheckpointSaver:
    """What writes the checkpoints of a configuration."""

    def score(metrics: dict[str, float]) -> float | None:
        """The mean over benchmarks or, where none is asked on the way, the mean reward of the step."""
        if not config.data.eval_interval:
            return metrics.get("reward/mean")
        scores = [value for key, value in metrics.items() if key.startswith(EVALUATION_PREFIX)]
        return sum(scores) / len(scores) if scores else None

    return CheckpointSaver(
        host,
        CheckpointFolder(directory.checkpoints),
        fingerprint=fingerprint(config),
        retention=Retention(config.trainer.keep_last, config.trainer.keep_best),
        background=config.trainer.async_save,
        about=history.to_json,
        score=score,
        report=report,
    )


def _size_of(weights: Path | None) -> int | None:
    """Bytes of a file, or of all files in a folder: a copy at another place is the same start."""
    if weights is None or weights.is_file():
        return None if weights is None else weights.stat().st_size
    return sum(path.stat().st_size for path in weights.rglob("*") if path.is_file())
