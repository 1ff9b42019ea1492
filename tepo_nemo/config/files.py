"""The files that a configuration names."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError

_GZIP = b"\x1f\x8b"
_SETTINGS = "model_config.yaml"  # what every .nemo has


def check_files(config: Config) -> None:
    """Raises UserError where a file that a run reads is not there or broken, the first one."""
    for mistake in missing_files(config):
        raise UserError(mistake)


def missing_files(config: Config) -> Iterator[str]:
    """One line about each file or folder that is not there, or is no whole checkpoint."""
    model, checkpoint = config.model, config.model.restore_from_path
    if checkpoint is not None and not checkpoint.exists():
        yield (
            f"model.restore_from_path={checkpoint}: no such checkpoint (make it with tepo-nemo convert, or "
            "correct the path)"
        )
    elif checkpoint is not None and checkpoint.is_file() and (fault := _fault(checkpoint)):
        yield (
            f"model.restore_from_path={checkpoint}: is no whole .nemo archive ({fault}; copy or make it "
            "again, or give an extracted folder)"
        )
    folder = model.tokenizer.type if model.tokenizer is not None else ""
    if folder.startswith("/") and not Path(folder).is_dir():
        yield f"model.tokenizer.type={folder}: no such folder (correct the path)"
    if config.replay is not None and not config.replay.is_dir():
        yield (
            f"replay={config.replay}: no such folder (give one of rollouts/ or bad_updates/ of a run, or "
            "rollouts/)"
        )
    sets = {f"data.evaluation.{number}.path": each.path for number, each in enumerate(config.data.evaluation)}
    for key, path in {"data.train": config.data.train, **sets}.items():
        if not path.is_file():
            yield f"{key}={path}: no such file (make it with tepo-nemo prepare-data, or correct the path)"


def _fault(archive: Path) -> str | None:
    """What is wrong with a file that should be a `.nemo`; reads nothing but the headers of its members."""
    try:
        with open(archive, "rb") as file:
            if file.read(2) == _GZIP:
                return None  # it would have to be unpacked to be looked at
        with tarfile.open(archive, "r:") as members:
            names = [Path(name).name for name in members.getnames()]
    except tarfile.TarError as error:
        return str(error)
    except OSError as error:
        return error.strerror
    return None if _SETTINGS in names else f"it has no {_SETTINGS}"
