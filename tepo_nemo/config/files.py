"""The files that a configuration names."""

from collections.abc import Iterator
from pathlib import Path

from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError


def check_files(config: Config) -> None:
    """Raises UserError where a file that a run reads is not there, the first one."""
    for mistake in missing_files(config):
        raise UserError(mistake)


def missing_files(config: Config) -> Iterator[str]:
    """One line about each file or folder that is not there."""
    model = config.model
    if model.restore_from_path is not None and not model.restore_from_path.exists():
        yield (
            f"model.restore_from_path={model.restore_from_path}: no such checkpoint (make it with tepo-nemo "
            "convert, or correct the path)"
        )
    folder = model.tokenizer.type if model.tokenizer is not None else ""
    if folder.startswith("/") and not Path(folder).is_dir():
        yield f"model.tokenizer.type={folder}: no such folder (correct the path)"
    sets = {f"data.evaluation.{number}.path": each.path for number, each in enumerate(config.data.evaluation)}
    for key, path in {"data.train": config.data.train, **sets}.items():
        if not path.is_file():
            yield f"{key}={path}: no such file (make it with tepo-nemo prepare-data, or correct the path)"
