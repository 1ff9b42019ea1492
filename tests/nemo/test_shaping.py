"""Advantages of tokens on the real actor: those of the whole rollout, however it is shared out."""

from collections.abc import Callable

import pytest
import torch
from support.layouts import LAYOUTS, REFERENCE, Given
from support.reference_model import response_statistics
from support.synthetic import RESPONSES_PER_UPDATE, Rows, mini_batches_of, stack_rows, to_rows
from support.toy import ToyFolder, build_objective, build_policy
from support.worlds import Worlds

from tepo_nemo.config.schema import Config
from tepo_nemo.objectives import RolloutTokens
from tepo_nemo.training.batch import TokenStatistics, TrainBatch

pytestmark = pytest.mark.timeout(300)  # the first test to need a model waits for it

METHODS = ["erpo", "ep_grpo"]


def rewards_of(batch: TrainBatch) -> torch.Tensor:
    return (batch.advantages > 0).double()


def shaped(rank: int, world_size: int, configs: dict[str, Config], batch: TrainBatch, old: Rows) -> dict:
    """This rank's advantages by row, for each method and micro-batch size."""
    from tepo_nemo.training.shaping import with_shaped_advantages
    from tepo_nemo.training.statistics import with_reference_logprobs

    _, policy = build_policy(next(iter(configs.values())))
    policy.prepare_for_training()
    found = {}
    for size in (1, 4):
        mini_batches = with_reference_logprobs(
            policy,
            mini_batches_of(
                policy, batch, old, responses_per_update=RESPONSES_PER_UPDATE, micro_batch_size=size
            ),
        )
        for name, config in configs.items():
            of_tokens = with_shaped_advantages(
                policy, build_objective(config.algorithm), mini_batches, batch, rewards_of(batch)
            )
            found[name, size] = to_rows(
                of_tokens,
                [
                    [TokenStatistics(micro.advantages, micro.advantages) for micro in mini.micro_batches]
                    for mini in of_tokens
                ],
            )
    return found


@pytest.mark.parametrize("layout", [REFERENCE, "tp2", "pp2", "dp2"])
def test_every_layout_shapes_the_whole_rollout(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given], layout: str
) -> None:
    """From the old values that each was given, and those of the reference in float64."""
    start = given(False)
    batch = start.batch
    reference = torch.zeros_like(start.old.logprobs, dtype=torch.float64)
    for row, length in enumerate(batch.response_lengths.tolist()):
        if length:
            logprobs, _ = response_statistics(start.weights_in_float64, batch, row)
            reference[row, :length] = logprobs.detach()
    configs = {name: LAYOUTS[layout].config(toy, *start.overrides, f"algorithm={name}") for name in METHODS}
    ranks = worlds(LAYOUTS[layout].ranks, stack="nemo").run(shaped, configs, batch, start.old, timeout=110)
    for name, config in configs.items():
        expected = build_objective(config.algorithm).shape_advantages(
            RolloutTokens(
                old_logprobs=start.old.logprobs.double(),
                old_entropy=start.old.entropy.double(),
                reference_logprobs=reference,
                advantages=batch.advantages.double(),
                rewards=rewards_of(batch),
                groups=batch.groups,
                mask=torch.arange(reference.shape[1]) < batch.response_lengths[:, None],
            )
        )
        assert (expected.std(dim=1) > 0.1).sum() > len(batch) / 2, "tokens of a response are to differ"
        for size in (1, 4):
            actual = stack_rows([found[name, size] for found in ranks], len(batch)).logprobs
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)
