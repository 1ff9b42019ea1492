"""The layouts that must agree, and what each makes of one and the same rollout."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from support.gather import whole
from support.synthetic import RESPONSES_PER_UPDATE, Rows, first_rows, stack_rows, with_lengths
from support.toy import VOCABULARY, ToyFolder
from support.updates import Case, Job, Report, Updates
from torch import Tensor

from tepo_nemo.config.presets import choices, config_folder
from tepo_nemo.config.schema import AlgorithmConfig, Config
from tepo_nemo.training.batch import TrainBatch


@dataclass(frozen=True)
class Layout:
    """Ranks, and what else is spread or recomputed."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    plain_output_layer: bool = False

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
        if self.plain_output_layer:
            own.append("trainer.fused_output_layer=false")
        return toy.config(*own, *overrides, tensor=self.tensor, pipeline=self.pipeline, data=self.data)


REFERENCE = "tp1"
LAYOUTS = {
    REFERENCE: Layout(),
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "dp2": Layout(data=2),
    "tp2_pp2": Layout(tensor=2, pipeline=2),
    "tp2_sp": Layout(tensor=2, sequence_parallel=True),
    "pp2_recompute": Layout(pipeline=2, recompute=True),
    "tp2_pp2_sp_recompute": Layout(tensor=2, pipeline=2, sequence_parallel=True, recompute=True),
    "tp2_dp2": Layout(tensor=2, data=2),
    "tp2_sp_plain": Layout(tensor=2, sequence_parallel=True, plain_output_layer=True),
}
# What is compared with the reference, by whether the embedding is tied.
SPREAD = {
    False: [name for name in LAYOUTS if name != REFERENCE],
    True: ["tp2", "pp2", "dp2", "tp2_pp2", "tp2_pp2_sp_recompute", "tp2_sp_plain"],
}


@dataclass(frozen=True)
class Given:
    """What every layout starts from: weights, a rollout, and its old statistics."""

    path: Path
    tied: bool
    weights: dict[str, Tensor]
    batch: TrainBatch
    start: Rows  # statistics at the weights
    old: Rows  # statistics at made-up older weights

    @property
    def weights_in_float64(self) -> dict[str, Tensor]:
        """Copies to differentiate by."""
        return {name: value.double().requires_grad_() for name, value in self.weights.items()}

    @property
    def overrides(self) -> tuple[str, ...]:
        """What makes a configuration start from these weights."""
        return (
            f"model.restore_from_path={self.path}",
            f"model.share_embeddings_and_output_weights={str(self.tied).lower()}",
        )


@dataclass(frozen=True)
class Outcome:
    """A job's answer, put together from all ranks."""

    losses: dict[str, float]  # of each case
    gradients: dict[str, dict[str, Tensor]]
    layer_lengths: dict[str, list[int]]
    metrics: list[
        dict[str, dict[str, float]]
    ]  # of each rank: of each case, and of each update as "update 0"...
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    grad_norms: list[float]
    statistics: list[Rows]  # just before each update

    @property
    def change(self) -> dict[str, Tensor]:
        """What the updates did to the weights."""
        return {name: self.after[name] - before for name, before in self.before.items()}


# By mode: in fp32 each optimizer; in bf16 all of production mode, and autocasting from fp32 weights. The
# gradient norms are above 2, so that all of them clip.
CLIP = 0.5
# What selects a few tokens of 16 responses, of which some covariances are on either side of an interval.
FOR_SHORT_BATCHES = {
    "clip_cov": {"selected_fraction": 0.1, "covariance_low": 0.5, "covariance_high": 2.0},
    "kl_cov": {"selected_fraction": 0.1},
}
FP32, BF16 = ("sgd", "adam", "distributed_adam"), ("production", "autocast")
MODES = {
    "sgd": ["trainer.optimizer.name=sgd", "trainer.optimizer.learning_rate=0.5"],
    "adam": ["trainer.optimizer.name=adam", "trainer.optimizer.learning_rate=1e-3"],
    "distributed_adam": ["trainer.optimizer.name=distributed_adam", "trainer.optimizer.learning_rate=1e-3"],
}
MODES["production"] = [*MODES["distributed_adam"], "model.precision=bf16", "model.megatron_amp_O2=true"]
MODES["autocast"] = [*MODES["adam"], "model.precision=bf16"]


def layout_jobs(toy: ToyFolder, layout: Layout, given: Given) -> dict[str, Job]:
    """What a layout is asked for, by mode: the updates, and losses at the starting weights."""
    algorithm = toy.config().algorithm
    tepo = {
        "tepo": Case(given.batch, given.old, algorithm),
        "at the old weights": Case(given.batch, None, algorithm),
    }
    cases = {"sgd": loss_cases(toy, layout, given), "adam": {}}
    return {
        name: Job(
            layout.config(toy, *given.overrides, *overrides, f"trainer.optimizer.gradient_clip={CLIP}"),
            cases.get(name, tepo),
            Updates(given.batch, given.old),
        )
        for name, overrides in MODES.items()
        if works(name, layout)
    }


def works(mode: str, layout: Layout) -> bool:
    """Megatron-core's own layers cannot be autocast under sequence parallelism; Transformer Engine's can."""
    return not (mode == "autocast" and layout.sequence_parallel)


def loss_cases(toy: ToyFolder, layout: Layout, given: Given) -> dict[str, Case]:
    """Losses at the starting weights. Those named "tepo, micro-batch ..." are one and the same loss."""
    in_one = RESPONSES_PER_UPDATE // layout.data
    batch, old, tepo = given.batch, given.old, toy.config().algorithm
    five, five_old = first_rows(batch, old, 5)
    two, two_old = first_rows(with_lengths(batch, {0: 3, 1: 7}), old, 2)

    def masked(rows: Iterable[int]) -> Case:
        return Case(with_lengths(batch, dict.fromkeys(rows, 0)), old, tepo)

    return {
        **{f"tepo, micro-batch {size}": Case(batch, old, tepo, micro_batch_size=size) for size in (1, 2, 4)},
        "tepo, micro-batch of all": Case(batch, old, tepo, micro_batch_size=in_one),
        "entropy bonus": Case(batch, old, toy.config("algorithm.entropy_bonus=0.01").algorithm),
        "covariance": Case(batch, old, toy.config("algorithm.entropy_drop=covariance").algorithm),
        **{
            # A micro-batch size of its own, too: one comparison for both.
            f"algorithm={name}": Case(batch, old, algorithm, micro_batch_size=4 if layout.ranks == 1 else 8)
            for name, algorithm in every_method().items()
            # No loss knows of the embedding: with a tied one, a single method has a look.
            if not given.tied or name == "grpo_dapo"
        },
        "at the old weights": Case(batch, None, tepo),
        # A step that is not full: the second data-parallel rank has one response and three that are padding.
        "five of eight": Case(five, five_old, tepo, micro_batch_size=2, responses_per_update=8),
        # 3 and 7 tokens: a rank's or a micro-batch's own mean would weigh them alike.
        "two responses": Case(two, two_old, tepo, micro_batch_size=1, responses_per_update=2),
        # The last micro-batch, all that a second data-parallel rank has, and everything.
        "last micro-batch masked": masked(range(12, 16)),
        "second half masked": masked(range(8, 16)),
        "all masked": masked(range(16)),
    }


def every_method() -> dict[str, AlgorithmConfig]:
    """The presets of `algorithm`, with the options of `FOR_SHORT_BATCHES`."""
    folder = config_folder() / "algorithm"
    return {
        name: AlgorithmConfig(
            **yaml.safe_load((folder / f"{name}.yaml").read_text()) | FOR_SHORT_BATCHES.get(name, {})
        )
        for name in choices()["algorithm"]
    }


def merge(job: Job, reports: Sequence[Report]) -> Outcome:
    """Put the ranks' reports together."""
    tied = job.config.model.share_embeddings_and_output_weights

    def joined(parts: Sequence) -> dict[str, Tensor]:
        return whole(parts, vocabulary=VOCABULARY, tied=tied)

    first = reports[0]
    rows = 0 if job.updates is None else len(job.updates.batch)
    return Outcome(
        losses={name: taken.metrics["loss"] for name, taken in first.cases.items()},
        gradients={
            name: joined([report.cases[name].gradients for report in reports]) for name in first.cases
        },
        layer_lengths={name: taken.layer_lengths for name, taken in first.cases.items()},
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


def assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str
) -> None:
    """Each tensor within a relative distance; the message names the worst."""
    found = distances(actual, expected)
    worst = max(found, key=found.get)
    assert found[worst] <= tolerance, f"{what}: {worst} is off by {found[worst]:.1e}, allowed {tolerance:.0e}"
