from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.gather import whole
from support.synthetic import Rows, disturbed, synthetic_batch
from support.toy import VOCABULARY, ToyFolder, make_toy_folder
from support.updates import make_start
from support.worlds import Worlds
from torch import Tensor

from tepo_nemo.training.batch import TrainBatch


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
    def overrides(self) -> tuple[str, ...]:
        return (
            f"model.restore_from_path={self.path}",
            f"model.share_embeddings_and_output_weights={str(self.tied).lower()}",
        )


@pytest.fixture(scope="session")
def toy(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> ToyFolder:
    (folder,) = worlds(1, stack="nemo").run(make_toy_folder, tmp_path_factory.mktemp("toy"))
    return folder


@pytest.fixture(scope="session")
def given(worlds: Worlds, toy: ToyFolder) -> Callable[[bool], Given]:
    """`given(tied)`: one `.nemo`, saved once at TP1, for all tests of the session."""
    made: dict[bool, Given] = {}

    def get(tied: bool) -> Given:
        if tied not in made:
            batch = synthetic_batch()
            path = toy.path / f"{'tied' if tied else 'untied'}.nemo"
            config = toy.config(f"model.share_embeddings_and_output_weights={str(tied).lower()}")
            (start,) = worlds(1, stack="nemo").run(make_start, config, path, batch, timeout=100)
            made[tied] = Given(
                path=path,
                tied=tied,
                weights=whole([start.weights], vocabulary=VOCABULARY, tied=tied),
                batch=batch,
                start=start.rows,
                old=disturbed(start.rows, batch.response_lengths),
            )
        return made[tied]

    return get
