"""A study file: which experiments, with which seeds, and what its report shows and claims."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf
from pydantic import Field, ValidationError

from tepo_nemo.config.base import Count, CountOrZero, Section
from tepo_nemo.config.load import read_yaml
from tepo_nemo.config.messages import first_mistake, nearest
from tepo_nemo.config.presets import STUDIES, config_folder
from tepo_nemo.errors import UserError
from tepo_nemo.runs.metrics import EVALUATION_PREFIX, METRICS
from tepo_nemo.study.measures import MEASURES

Seeds = list[CountOrZero]


class Experiment(Section):
    """One configuration, run with several seeds."""

    label: str = Field(pattern=r"[A-Za-z0-9]")
    """What tables, figures and claims call it."""
    overrides: list[str] = []
    """Overrides, after those of the base."""
    seeds: Seeds | None = Field(default=None, min_length=1)
    """Null takes those of the study."""


class Rows(Section):
    """Some rows of a table."""

    title: str | None = None
    """A heading above them."""
    labels: list[str] = Field(min_length=1)
    """Of experiments."""


class Table(Section):
    """Experiments by benchmarks, and by what their training was like."""

    title: str
    """Its heading."""
    rows: list[Rows] = Field(min_length=1)
    """From top to bottom."""


class Figure(Section):
    """Curves over the steps: the mean over seeds and its interval, one panel a metric."""

    name: str = Field(pattern=r"^[a-z0-9_]+$")
    """Of its file."""
    title: str
    """Above it."""
    labels: list[str] = Field(min_length=1)
    """Of experiments, one line each."""
    metrics: list[str] = Field(min_length=1)
    """Keys of metrics.jsonl."""


class Claim(Section):
    """A direction that the study looks for."""

    claim: str
    """In words."""
    measure: str
    """What is compared."""
    expect: Literal["lower", "higher"]
    """Which side `of` is said to be on."""
    of: str
    """The label of an experiment."""
    than: str | None = None
    """The label of another one; null is 0."""


class Study(Section):
    """Experiments x seeds, and a report."""

    name: str = Field(min_length=1)
    """The report's title."""
    base: list[str] = []
    """Overrides of every cell."""
    seeds: Seeds = Field(min_length=1)
    """Of experiments that have none of their own."""
    jobs: Count = 1
    """Cells that run side by side."""
    reward_threshold: float
    """The steps count until the mean reward gets there."""
    window: Count = 5
    """Steps that the moving average of the reward takes, and the last values of a run."""
    experiments: list[Experiment] = Field(min_length=1)
    """In the order in which they run."""
    tables: list[Table] = []
    """Of the report."""
    figures: list[Figure] = []
    """Of the report."""
    claims: list[Claim] = []
    """Of the report."""

    @property
    def labels(self) -> list[str]:
        """Of the experiments."""
        return [experiment.label for experiment in self.experiments]


def find_study(path: Path) -> Path:
    """A file, or the shipped study of that name. Raises UserError."""
    if path.exists():
        return path
    shipped = {each.stem: each for each in sorted((config_folder() / STUDIES).glob("*.yaml"))}
    if str(path) in shipped:
        return shipped[str(path)]
    raise UserError(
        f"{path}: there is no such study file (or the name of a shipped one: {', '.join(shipped)})"
    )


def load_study(path: Path) -> Study:
    """Read and check a study file.

    Raises:
        UserError: a mistake, the first one; names the file and the key.
    """
    values = OmegaConf.to_container(read_yaml(path))  # interpolations are for the overrides
    try:
        study = Study.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {first_mistake(error, Study)}") from error
    if (mistake := next(_mistakes(study), None)) is not None:
        raise UserError(f"{path}: {mistake}")
    return study


def _mistakes(study: Study) -> Iterator[str]:
    """What no single key can show."""
    yield from _repeated("experiments.label", study.labels)
    yield from _repeated("figures.name", [figure.name for figure in study.figures])
    yield from _repeated("seeds", study.seeds)
    for experiment in study.experiments:
        yield from _repeated(f"seeds of {experiment.label}", experiment.seeds or [])
    for place, label in _named_labels(study):
        if label not in study.labels:
            yield f"{place}={label}: no experiment has this label; {nearest(label, study.labels)}"
    for figure in study.figures:
        for metric in figure.metrics:
            if metric not in METRICS and not metric.startswith(EVALUATION_PREFIX):
                hint = nearest(metric, list(METRICS))
                yield f"figures.{figure.name}.metrics={metric}: is no metric; {hint}"
    for claim in study.claims:
        if claim.measure not in MEASURES and not claim.measure.startswith(EVALUATION_PREFIX):
            choices = [*MEASURES, f"{EVALUATION_PREFIX}BENCHMARK"]
            yield f"claims.measure={claim.measure}: is no measure; {nearest(claim.measure, choices)}"


def _named_labels(study: Study) -> Iterator[tuple[str, str]]:
    for table in study.tables:
        for rows in table.rows:
            yield from (("tables.rows.labels", label) for label in rows.labels)
    for figure in study.figures:
        yield from ((f"figures.{figure.name}.labels", label) for label in figure.labels)
    for claim in study.claims:
        yield "claims.of", claim.of
        if claim.than is not None:
            yield "claims.than", claim.than


def _repeated(place: str, values: list) -> Iterator[str]:
    for value in dict.fromkeys(value for value in values if values.count(value) > 1):
        yield f"{place}: {value} is there twice; remove one"
