"""Weights, gradients and optimizer state of the plan against the tensors of real hosts."""

from collections.abc import Callable

import pytest
from support.layouts import LAYOUTS, MODES, Given
from support.memory import measure_bytes
from support.toy import ToyFolder
from support.worlds import Worlds

from tepo_nemo.planning.plan import make_plan

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

# In fp32 with each optimizer, autocast, production mode. A tied embedding lies on both ends of a pipeline.
CASES = {
    "tp1": (["sgd", "adam", "autocast"], False),
    "dp2": (["distributed_adam", "production"], False),
    "tp2": (["adam", "production"], False),
    "pp2": (["adam", "production"], True),
}


@pytest.mark.parametrize("layout", CASES)
def test_bytes_of_a_rank(worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given], layout: str) -> None:
    """Within 2 %: Megatron pads its buffers."""
    modes, tied = CASES[layout]
    start = given(tied)
    configs = [LAYOUTS[layout].config(toy, *start.overrides, *MODES[mode]) for mode in modes]
    world = worlds(LAYOUTS[layout].ranks, stack="nemo")
    of_ranks = world.run(measure_bytes, configs, start.batch, start.old, timeout=110)
    for rank, of_rank in enumerate(of_ranks):
        for mode, config, measured in zip(modes, configs, of_rank, strict=True):
            stages = make_plan(config).stages
            planned = stages[rank if len(stages) > 1 else 0]
            for part, size in measured.items():
                assert getattr(planned, part) == pytest.approx(size, rel=0.02), (rank, mode, part)


def test_the_vocabulary_is_the_configured_one(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given]
) -> None:
    """200 rows, where the tokenizer has 17 entries; by the tokenizer, weights would be a quarter less."""
    start = given(False)
    config = LAYOUTS["tp2"].config(toy, "model.vocab_size=200")
    for (measured,) in worlds(2, stack="nemo").run(
        measure_bytes, [config], start.batch, start.old, timeout=110
    ):
        assert measured["weights"] == make_plan(config).stages[0].weights
