"""The run directory: where everything that a run writes has its place."""

from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import require_new_folder, write_atomic


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside the run directory `path`; `create` makes a new one."""

    path: Path

    @classmethod
    def create(cls, path: Path, config_yaml: str) -> "RunDirectory":
        """Makes the directory with its sub-folders and saves the resolved config in it.

        The directory is filled in place, not renamed into place, because it may be a mount point.

        Raises:
            UserError: `path` is a file, a folder that is not empty, or cannot be written.
        """
        run = cls(Path(path))
        require_new_folder(run.path)
        try:
            for folder in (run.samples_folder, run.checkpoints, run.plots, run.tensorboard, run.logs):
                folder.mkdir(parents=True)
            write_atomic(run.config, config_yaml)
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            raise UserError(f"output={path}: {reason}; choose another folder") from error
        return run

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

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"
