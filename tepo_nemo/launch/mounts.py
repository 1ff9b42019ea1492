"""Whether the container of a job sees what a run reads and writes: else it is not found, or lost."""

import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tepo_nemo.config.presets import shipped_folder
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError


def check_mounts(config: Config) -> None:
    """Compare the paths of a configuration with the settings of the site, slurm/env.sh.

    Raises UserError for the first path that lies in no folder of the container. Jobs on CPUs have none.
    """
    if config.hardware.accelerator == "cpu":
        return
    image, mounts, *mounted = _settings("TEPO_IMAGE", "TEPO_MOUNTS", "TEPO_CODE", "TEPO_PACKAGES")
    if image:
        check_paths(config, [*_targets(mounts), *(Path(folder) for folder in mounted if folder)], mounts)


def check_paths(config: Config, folders: Sequence[Path], mounts: str) -> None:
    """Raises UserError for a path of the configuration that is in none of the folders."""
    for key, path in _paths(config):
        if not any(path.is_relative_to(folder) for folder in folders):
            raise UserError(
                f"{key}={path}: is in no folder that the container sees, TEPO_MOUNTS={mounts} "
                f"(export TEPO_MOUNTS={mounts},{path.parent}:{path.parent}, or set it in slurm/env.sh)"
            )


def _paths(config: Config) -> Iterator[tuple[str, Path]]:
    yield "output", config.output
    yield "data.train", config.data.train
    for number, benchmark in enumerate(config.data.evaluation):
        yield f"data.evaluation.{number}.path", benchmark.path
    model = config.model
    if model.restore_from_path is not None:
        yield "model.restore_from_path", model.restore_from_path
    if model.tokenizer is not None and model.tokenizer.type.startswith("/"):
        yield "model.tokenizer.type", Path(model.tokenizer.type)


def _targets(mounts: str) -> list[Path]:
    """Where SOURCE:TARGET:FLAGS,SOURCE,... are in the container."""
    return [Path((mount.split(":") * 2)[1]) for mount in mounts.split(",")]


def _settings(*names: str) -> list[str]:
    """The values of variables of env.sh, which is a script."""
    folder = shlex.quote(str(shipped_folder("slurm")))
    wanted = " ".join(f'"${{{name}-}}"' for name in names)
    program = f"TEPO_SLURM={folder}; source {folder}/env.sh && printf '%s\\0' {wanted}"
    ended = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"{folder}/env.sh: cannot be read ({ended.stderr.strip()}; correct it)")
    return ended.stdout.split("\0")[: len(names)]
