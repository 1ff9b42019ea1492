"""Random generators of a rank come back as they were: those of this rank, and of no other (faults 28)."""

import random

import numpy as np
import pytest
import torch
from support.toy import ToyFolder, build_policy
from support.worlds import Worlds

from tepo_nemo.config.schema import Config

pytestmark = pytest.mark.timeout(200)


def draws() -> list[float]:
    """One of each generator."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(()).item()
    return [random.random(), float(np.random.rand()), random.gauss(0, 1), torch.rand(()).item(), tracked]


def save_draw_restore_draw(rank: int, world_size: int, config: Config) -> tuple[list[float], list[float]]:
    from tepo_nemo.nemo.random_state import random_state, restore_random_state

    build_policy(config)
    torch.manual_seed(100 + rank)  # whoever gets the state of another rank draws something else
    random.seed(200 + rank)
    np.random.seed(300 + rank)
    draws()
    random.gauss(0, 1)  # which keeps a second one for the next call
    state = {name: value.clone() for name, value in random_state().items()}
    first = draws()
    draws()
    restore_random_state(state)
    return first, draws()


def test_each_rank_draws_again_what_it_drew(worlds: Worlds, toy: ToyFolder) -> None:
    config = toy.config(tensor=2, pipeline=2)
    answers = worlds(4, stack="nemo").run(save_draw_restore_draw, config, timeout=110)
    for first, second in answers:
        assert first == second
    assert len({tuple(first[:4]) for first, _ in answers}) == 4
