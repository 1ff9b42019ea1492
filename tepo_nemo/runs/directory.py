"""The run directory: where everything that a run writes has its place."""

from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import require_new_folder, write_atomic


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside the run directory `path`; `create` makes a new one, `reopen` goes on."""

    path: Path

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> "RunDirectory":
        """Makes the directory with its sub-folders and saves the resolved config in it.

        The directory is filled in place, not renamed into place, because it may be a mount point.

        Raises:
            UserError: `path` is a file, a folder that is not empty, or cannot be written.
        """
        run = cls(Path(path))
        if not run._is_hollow():
            require_new_folder(run.path)
        run._fill(config_yaml)
        return run

    @classmethod
    def reopen(cls, path: Path, config_yaml: str) -> "RunDirectory":
        """That of a run that goes on, with the configuration of now. Raises UserError as `create` does."""
        run = cls(Path(path))
        run._fill(config_yaml)
        return run

    @property
    def exists(self) -> bool:
        """Whether a run has begun here."""
        return self.config.is_file() and self.checkpoints.is_dir()

    def _is_hollow(self) -> bool:
        """Whether all there is was left by a process that was killed while it made the directory."""
        own = {folder.name for folder in self._folders}
        return self.path.is_dir() and all(
            (entry.is_dir() and entry.name in own and not any(entry.iterdir()))
            or entry.name.startswith(f".{self.config.name}.")
            for entry in self.path.iterdir()
        )

    def _fill(self, config_yaml: str) -> None:
        try:
            for folder in self._folders:
                folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.config, config_yaml)  # last: from now on it is a run
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            raise UserError(f"output={self.path}: {reason}; choose another folder") from error

    @property
    def _folders(self) -> tuple[Path, ...]:
        return (self.samples_folder, self.checkpoints, self.plots, self.tensorboard, self.logs)

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def samples_folder(self) -> Path:
        return self.path / "samples"

    def samples(self, step: int) -> Path:
        """The samples file of one step; the names sort in the order of the steps."""
        return self.samples_folder / f"step_{step:06d}.jsonl"

    def drop_samples(self, after: int) -> None:
        """Delete the samples of the steps after `after`."""
        for path in self.samples_folder.glob("step_*.jsonl"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > after:
                path.unlink()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def exported(self, step: int) -> Path:
        """The weights at the end, for other programs."""
        return self.checkpoints / f"step_{step:06d}.nemo"

    def rollout(self, step: int) -> Path:
        """The rollout of one step, for replay."""
        return self.path / "rollouts" / f"step_{step:06d}"

    def bad_update(self, step: int, update: int) -> Path:
        """The rollout of an update that was skipped, for replay."""
        return self.path / bad_update_name(step, update)

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def tracked(self, tracker: str) -> Path:
        """What the run is called by a tracker, so that it goes on there."""
        return self.path / f"{tracker}_run"

    @property
    def logs(self) -> Path:
        return self.path / "logs"


def bad_update_name(step: int, update: int) -> str:
    """Where in a run directory the rollout of a skipped update is; the names sort in the order of updates."""
    return f"bad_updates/step_{step:06d}_update_{update:03d}"
