"""The cells of a study: one run each, and each run once however many experiments it belongs to."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.config.flat import flat
from tepo_nemo.config.load import dump_config, load_config
from tepo_nemo.config.messages import shown
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.files import write_atomic
from tepo_nemo.runs.summary import read_summary
from tepo_nemo.study.schema import Experiment, Study

_SET_BY_STUDY = {"seed": "the seeds of the study", "output": "--output"}


@dataclass(frozen=True, eq=False)
class Cell:
    """One run: of an experiment, the first in the study that has it, with a seed."""

    label: str
    seed: int
    config: Config
    """Its `output` is the run directory."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.label}, seed {self.seed}"

    @property
    def run(self) -> RunDirectory:
        """Where the run writes."""
        return RunDirectory(self.config.output)

    @property
    def config_file(self) -> Path:
        """What the run is started from."""
        return self.run.path.with_suffix(".yaml")

    @property
    def log(self) -> Path:
        """What the command of the run says."""
        return self.run.path.with_suffix(".log")

    def is_finished(self) -> bool:
        """Whether the run is done.

        Raises:
            UserError: it is, with another configuration than the study's; names the cell and the first key.
        """
        if not self.run.summary.exists() or read_summary(self.run.summary)["status"] != "done":
            return False
        try:
            stored, wanted = flat(load_config(config_file=self.run.config)), flat(self.config)
        except UserError as mistake:
            raise UserError(f"{self.run.config}: {mistake}") from mistake
        for key in {**wanted, **stored}:
            # A study may move to another folder.
            if key != "output" and stored.get(key) != wanted.get(key):
                raise UserError(
                    f"{self.run.path}: {self.name} is finished with {key}={shown(stored.get(key))}, and the "
                    f"study says {shown(wanted.get(key))}; move that run away, or give another --output"
                )
        return True

    def prepare(self) -> None:
        """Take away what an unfinished run has left, and write what the next one is started from."""
        if self.run.path.exists():
            shutil.rmtree(self.run.path)
        self.run.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.config_file, dump_config(self.config))


@dataclass(frozen=True)
class Plan:
    """Which runs make up a study."""

    rows: dict[str, list[Cell]]
    """Experiment -> its cells, in the order of its seeds. Experiments may share cells."""

    def cells(self, labels: Sequence[str] | None = None) -> list[Cell]:
        """Each cell once: the first seed of every experiment, then the second of every one, and so on.

        Args:
            labels: only cells of these experiments.
        """
        rows = [cells for label, cells in self.rows.items() if labels is None or label in labels]
        longest = max(map(len, rows), default=0)
        return list(dict.fromkeys(row[index] for index in range(longest) for row in rows if index < len(row)))

    def finished(self) -> set[Cell]:
        """The cells that are done. Raises UserError, see `Cell.is_finished`."""
        return {cell for cell in self.cells() if cell.is_finished()}


def make_plan(study: Study, output: Path, check: Callable[[Config], None]) -> Plan:
    """Resolve and check the configuration of every cell; cells of equal configurations are one.

    Args:
        output: the folder of the study.
        check: what more can be found wrong before a run starts; called once an experiment.

    Raises:
        UserError: the first mistake, with the experiment that makes it.
    """
    _check_overrides("base", study.base)
    _check_folders(study.labels)
    known: dict[str, Cell] = {}
    rows: dict[str, list[Cell]] = {}
    for experiment in study.experiments:
        try:
            cells = list(_cells(study, experiment, output))
            check(cells[0].config)
        except UserError as mistake:
            raise UserError(f"{experiment.label}: {mistake}") from mistake
        rows[experiment.label] = [
            known.setdefault(cell.config.model_dump_json(exclude={"output"}), cell) for cell in cells
        ]
    return Plan(rows)


def _cells(study: Study, experiment: Experiment, output: Path) -> Iterator[Cell]:
    _check_overrides("overrides", experiment.overrides)
    for seed in experiment.seeds or study.seeds:
        config = load_config([*study.base, *experiment.overrides, f"seed={seed}"])
        run = output.absolute() / "cells" / folder_name(experiment.label) / f"seed_{seed}"
        yield Cell(experiment.label, seed, config.model_copy(update={"output": run}))


def folder_name(label: str) -> str:
    """A label as the name of a folder: `TEPO w/o KL` is `tepo-w-o-kl`."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")


def _check_folders(labels: Sequence[str]) -> None:
    taken: dict[str, str] = {}
    for label in labels:
        other = taken.setdefault(folder_name(label), label)
        if other != label:
            raise UserError(f"{label}: would share the folder {folder_name(label)} with {other}; rename one")


def _check_overrides(place: str, overrides: Sequence[str]) -> None:
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in _SET_BY_STUDY:
            raise UserError(f"{place}: {override} is set by {_SET_BY_STUDY[key]} (remove it)")
