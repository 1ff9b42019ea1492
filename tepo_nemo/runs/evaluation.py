"""The directory of an evaluation, which an interrupted one leaves behind and the next one continues in."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.errors import UserError
from tepo_nemo.runs.files import require_new_folder, to_json, write_atomic


@dataclass(frozen=True)
class EvaluationDirectory:
    """Paths inside the directory `path`."""

    path: Path

    @classmethod
    def open(cls, path: Path, config_yaml: str, subject: dict) -> "EvaluationDirectory":
        """Make the directory, or go on in that of the same evaluation.

        Args:
            subject: JSON of all that the answers depend on; an evaluation is the same where it is.

        Raises:
            UserError: `path` is neither new, nor empty, nor an evaluation of the same subject, or cannot be
                written.
        """
        directory = cls(path)
        if directory._subject.is_file():
            directory._check_same(subject)
        else:
            require_new_folder(path)
        try:
            directory.logs.mkdir(parents=True, exist_ok=True)
            write_atomic(directory.config, config_yaml)
            write_atomic(directory._subject, to_json(subject) + "\n")
        except OSError as error:
            raise UserError(
                f"output={path}: cannot be written ({error.strerror}); choose another folder"
            ) from error
        return directory

    def empty(self) -> None:
        """Take away all that the directory holds; nothing but an evaluation's own is in it."""
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _check_same(self, subject: dict) -> None:
        begun = json.loads(self._subject.read_text(encoding="utf-8"))
        for key in subject | begun:
            if subject.get(key) != begun.get(key):
                raise UserError(
                    f"output={self.path}: is an evaluation with {key} {begun.get(key)!r:.200}, and "
                    f"this one has {subject.get(key)!r:.200}; choose another output"
                )

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def _subject(self) -> Path:
        return self.path / "subject.json"

    @property
    def problems(self) -> Path:
        """One JSON object a problem: its answers with their grading."""
        return self.path / "problems.jsonl"

    @property
    def report(self) -> Path:
        """All scores, for scripts."""
        return self.path / "report.json"

    @property
    def table(self) -> Path:
        """The scores as a person reads them."""
        return self.path / "table.txt"

    @property
    def logs(self) -> Path:
        return self.path / "logs"
