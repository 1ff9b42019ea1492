"""What the tests of the host share: a toy model, saved once, and what each layout makes of one rollout."""

from collections.abc import Callable

import pytest
from support.gather import whole
from support.layouts import LAYOUTS, Given, Outcome, layout_jobs, merge
from support.once import once
from support.synthetic import disturbed, synthetic_batch
from support.toy import VOCABULARY, ToyFolder, make_toy_folder
from support.updates import make_start, perform
from support.worlds import Worlds

WORLD_SECONDS = 110


@pytest.fixture(scope="session")
def toy(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> ToyFolder:
    (folder,) = worlds(1, stack="nemo").run(make_toy_folder, tmp_path_factory.mktemp("toy"))
    return folder


@pytest.fixture(scope="session")
def given(worlds: Worlds, toy: ToyFolder) -> Callable[[bool], Given]:
    """`given(tied)`: one `.nemo`, saved once at TP1, for all tests of the session."""

    def make(tied: bool) -> Given:
        batch = synthetic_batch()
        path = toy.path / f"{'tied' if tied else 'untied'}.nemo"
        config = toy.config(f"model.share_embeddings_and_output_weights={str(tied).lower()}")
        (start,) = worlds(1, stack="nemo").run(make_start, config, path, batch, timeout=WORLD_SECONDS)
        return Given(
            path=path,
            tied=tied,
            weights=whole([start.weights], vocabulary=VOCABULARY, tied=tied),
            batch=batch,
            start=start.rows,
            old=disturbed(start.rows, batch.response_lengths),
        )

    return once(make)


@pytest.fixture(scope="session")
def run(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given]
) -> Callable[[str, bool], dict[str, Outcome]]:
    """`run(layout, tied)`: the outcome of each job of `layout_jobs`; every layout works once."""

    def work(layout: str, tied: bool) -> dict[str, Outcome]:
        jobs = layout_jobs(toy, LAYOUTS[layout], given(tied))
        world = worlds(LAYOUTS[layout].ranks, stack="nemo")
        reports = world.run(perform, list(jobs.values()), timeout=WORLD_SECONDS)
        return {
            name: merge(job, of_job)
            for (name, job), of_job in zip(jobs.items(), zip(*reports, strict=True), strict=True)
        }

    return once(work)
