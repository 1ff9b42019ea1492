"""Evaluating a checkpoint on this machine."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.config.load import dump_config, load_config
from tepo_nemo.config.messages import nearest
from tepo_nemo.config.schema import Config
from tepo_nemo.data.prompts import fingerprint, load_prompts
from tepo_nemo.errors import UserError
from tepo_nemo.launch.local import run_ranks
from tepo_nemo.reward.grading import load_reward
from tepo_nemo.runs.checkpoints import CheckpointFolder, Position
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.evaluation import EvaluationDirectory


@dataclass(frozen=True)
class Checkpoint:
    """Weights, and the configuration of the run that they come from where there is one."""

    weights: Path
    config: Path | None
    output: Path | None  # where an evaluation of it goes unless the user says so


def find_checkpoint(path: Path, argument: str = "--checkpoint") -> Checkpoint:
    """The last checkpoint of a run directory, or the given `.nemo` file or folder itself.

    Args:
        argument: what `path` was given as, for messages.

    Raises:
        UserError: there is nothing at `path`, or the run has no checkpoint.
    """
    run = RunDirectory(path)
    if not run.config.is_file():
        if not path.exists():
            raise UserError(f"{argument}={path}: no such .nemo file or run directory; correct the path")
        return Checkpoint(path, None, None)
    saved = {Position.of(file.stem): file for file in run.checkpoints.glob("*.nemo")}
    folder = CheckpointFolder(run.checkpoints)
    saved = {position: folder.of(position) for position in folder.complete()} | saved
    if not saved:
        raise UserError(f"{argument}={path}: the run has saved no checkpoint; give another one")
    return Checkpoint(saved[max(saved)], run.config, path / "evaluation")


def evaluation_config(
    overrides: Sequence[str],
    config_file: Path | None = None,
    checkpoint: Path | None = None,
    benchmarks: Sequence[str] | None = None,
) -> Config:
    """The configuration of an evaluation.

    Args:
        overrides, config_file: as for training.
        checkpoint: of `find_checkpoint`; its own configuration is taken unless `config_file` is given.
        benchmarks: names of `data.evaluation`; None for all.

    Raises:
        UserError: any mistake, before anything is loaded or written.
    """
    chosen = list(overrides)
    if checkpoint is not None:
        found = find_checkpoint(checkpoint)
        config_file = config_file or found.config
        chosen.insert(0, f"model.restore_from_path='{found.weights.absolute()}'")
        if found.output is not None:
            chosen.insert(0, f"output='{found.output.absolute()}'")
    config = load_config(chosen, config_file)
    if config.model.restore_from_path is None:
        raise UserError("model.restore_from_path=null: there is nothing to evaluate (give --checkpoint PATH)")
    if not config.data.evaluation:
        raise UserError(
            "data.evaluation=[]: there is no benchmark (set data.evaluation, or choose data=math)"
        )
    return config if benchmarks is None else _only(config, benchmarks)


def start_local_evaluation(config: Config) -> int:
    """Evaluate on the ranks of this machine until they end; returns the exit code.

    Where the output has an evaluation of the same checkpoint and benchmarks that was interrupted, it goes on.

    Raises UserError on a mistake that shows before the ranks are started.
    """
    if config.hardware.nodes > 1:
        raise UserError(
            f"hardware.nodes={config.hardware.nodes}: this command starts the ranks of one machine "
            "(start examples/evaluate.py with srun or torchrun, or set hardware.nodes=1)"
        )
    with evaluation_directory(config) as directory:
        return run_ranks(
            [sys.executable, "-m", "tepo_nemo.launch.rank", "--evaluate", "--config", str(directory.config)],
            ranks=config.layout.world,
            logs=directory.logs,
            environment={"OMP_NUM_THREADS": "1"} if config.hardware.accelerator == "cpu" else {},
        )


@contextmanager
def evaluation_directory(config: Config) -> Iterator[EvaluationDirectory]:
    """The directory of a new evaluation, or of the same one that was interrupted.

    It is taken away again where a mistake ends the evaluation before its first answer. Raises UserError on a
    mistake that shows without the model.
    """
    load_reward(config.data.reward_parts)
    load_prompts(config.data.train)
    existed = config.output.exists()
    directory = EvaluationDirectory.open(config.output, dump_config(config), subject_of(config))
    try:
        yield directory
    except UserError:
        if not directory.problems.exists():
            directory.empty()
            if not existed:
                directory.path.rmdir()
        raise


def subject_of(config: Config) -> dict:
    """All that the answers depend on; layout and batch sizes are no part of it."""
    weights = config.model.restore_from_path
    state = weights.stat()
    return {
        "checkpoint": f"{weights} ({state.st_size} bytes, changed {state.st_mtime_ns})",
        "seed": config.seed,
        "reward": config.data.model_dump(mode="json")["reward"],
        "max_response_length": config.rollout.max_response_length,
        "benchmarks": {
            entry.name: {
                "fingerprint": fingerprint(load_prompts(entry.path)),
                "samples": entry.samples,
                "temperature": entry.temperature,
                "answer_form": entry.answer_form,
            }
            for entry in config.data.evaluation
        },
    }


def _only(config: Config, benchmarks: Sequence[str]) -> Config:
    entries = {entry.name: entry for entry in config.data.evaluation}
    for name in benchmarks:
        if name not in entries:
            raise UserError(f"--benchmarks {name}: is not in data.evaluation; {nearest(name, list(entries))}")
    chosen = [entry for entry in config.data.evaluation if entry.name in benchmarks]
    return config.model_copy(update={"data": config.data.model_copy(update={"evaluation": chosen})})
