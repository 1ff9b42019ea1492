"""The layouts that must agree, and what each makes of one and the same rollout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from support.gather import whole
from support.synthetic import Rows, stack_rows
from support.toy import VOCABULARY, ToyFolder
from support.updates import Job, Report
from torch import Tensor

from tepo_nemo.config.schema import Config


@dataclass(frozen=True)
class Layout:
    """Ranks, and what else is spread or recomputed."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence_parallel: bool = False
    recompute: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def config(self, toy: ToyFolder, *overrides: str) -> Config:
        """The toy's configuration at this layout."""
        own = []
        if self.sequence_parallel:
            own.append("model.sequence_parallel=true")
        if self.recompute:
            own.append("model.activations_checkpoint_granularity=full")
        return toy.config(*own, *overrides, tensor=self.tensor, pipeline=self.pipeline, data=self.data)


REFERENCE = "tp1"
LAYOUTS = {
    REFERENCE: Layout(),
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "dp2": Layout(data=2),
    "tp2_pp2": Layout(tensor=2, pipeline=2),
    "tp2_sp": Layout(tensor=2, sequence_parallel=True),
    "recompute": Layout(recompute=True),
    "tp2_pp2_sp_recompute": Layout(tensor=2, pipeline=2, sequence_parallel=True, recompute=True),
    "tp2_dp2": Layout(tensor=2, data=2),
}


@dataclass(frozen=True)
class Outcome:
    """A job's answer, put together from all ranks."""

    losses: dict[str, float]  # of each case
    gradients: dict[str, dict[str, Tensor]]
    metrics: list[dict[str, dict[str, float]]]  # of each rank: of each case, and of each update as "update 0"...
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    grad_norms: list[float]
    statistics: list[Rows]  # just before each update

    @property
    def change(self) -> dict[str, Tensor]:
        """What the updates did to the weights."""
        return {name: self.after[name] - before for name, before in self.before.items()}


def merge(job: Job, reports: Sequence[Report]) -> Outcome:
    """Put the ranks' reports together."""
    tied = job.config.model.share_embeddings_and_output_weights

    def joined(parts: Sequence) -> dict[str, Tensor]:
        return whole(parts, vocabulary=VOCABULARY, tied=tied)

    first = reports[0]
    rows = 0 if job.updates is None else len(job.updates.batch)
    return Outcome(
        losses={name: taken.metrics["loss"] for name, taken in first.cases.items()},
        gradients={name: joined([report.cases[name].gradients for report in reports]) for name in first.cases},
        metrics=[
            {name: taken.metrics for name, taken in report.cases.items()}
            | {f"update {number}": metrics for number, metrics in enumerate(report.metrics)}
            for report in reports
        ],
        before={} if job.updates is None else joined([report.before for report in reports]),
        after={} if job.updates is None else joined([report.after for report in reports]),
        grad_norms=first.grad_norms,
        statistics=[
            stack_rows([report.statistics[number] for report in reports], rows)
            for number in range(len(first.statistics))
        ],
    )


def distances(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """||a - b|| / ||b|| of each tensor."""
    assert actual.keys() == expected.keys()
    return {
        name: float((actual[name].double() - value.double()).norm() / value.double().norm())
        for name, value in expected.items()
    }


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str) -> None:
    """Each tensor within a relative distance; the message names the worst."""
    found = distances(actual, expected)
    worst = max(found, key=found.get)
    assert found[worst] <= tolerance, f"{what}: {worst} is off by {found[worst]:.1e}, allowed {tolerance:.0e}"
