"""The frozen reference policy on the real actor: for a pass it is the model, and it leaves no trace."""

from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from support.gather import Part, own_gradients, own_weights, whole
from support.layouts import FP32, LAYOUTS, MODES, REFERENCE, Given, assert_close
from support.once import once
from support.reference_model import response_statistics
from support.steps import same_weights
from support.synthetic import RESPONSES_PER_UPDATE, Found, Rows, mini_batches_of, stack_rows, to_rows
from support.toy import VOCABULARY, ToyFolder, build_policy
from support.worlds import Worlds
from torch import Tensor

from tepo_nemo.config.schema import Config
from tepo_nemo.training.batch import MiniBatch, TokenStatistics, TrainBatch

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

BETA = 0.5
WITH_KL = ["algorithm=grpo", f"algorithm.kl_coefficient={BETA}"]
CASES = [
    (layout, mode)
    for layout, modes in {
        REFERENCE: ("distributed_adam", "production"),
        "tp2": ("sgd", "production"),
        "pp2": ("sgd",),
        "dp2": ("distributed_adam", "production"),
    }.items()
    for mode in modes
]
every_case = pytest.mark.parametrize(("layout", "mode"), CASES)


class Passed(NamedTuple):
    """Two updates with a pass under the reference before each, on one rank."""

    weights: list[Part]  # before each update and after the last
    left_alone: list[bool]  # of each pass: whether every weight is the same afterwards, in the same place
    reference: list[Found]  # of each pass
    current: Found  # before the second update
    gradients: Part  # of the second update
    loss: float  # of the second update
    without_passes: Part  # weights after the same two updates of a host that never took a pass


def two_updates(
    rank: int, world_size: int, configs: dict[str, Config], batch: TrainBatch, old: Rows
) -> dict[str, Passed]:
    """Run in all ranks of a layout, for each mode."""
    return {mode: _two_updates(config, batch, old) for mode, config in configs.items()}


def _two_updates(config: Config, batch: TrainBatch, old: Rows) -> Passed:
    from tepo_nemo.training.statistics import with_reference_logprobs

    host, policy = build_policy(config)
    plain = mini_batches_of(policy, batch, old, responses_per_update=RESPONSES_PER_UPDATE, micro_batch_size=4)
    policy.prepare_for_training()
    weights, left_alone, reference, passed = [own_weights(host)], [], [], []
    for number in range(2):
        places = [parameter.data_ptr() for parameter in host.actor.parameters()]
        mini_batches = with_reference_logprobs(policy, plain)
        same_places = places == [parameter.data_ptr() for parameter in host.actor.parameters()]
        left_alone.append(same_places and same_weights(own_weights(host), weights[-1]))
        reference.append(_reference_rows(mini_batches))
        current = to_rows(plain, policy.get_token_statistics(plain))
        loss, gradients = _update(host, policy, mini_batches[number], config)
        weights.append(own_weights(host))
        passed.append(mini_batches[number])

    other_host, other_policy = build_policy(config)
    other_policy.prepare_for_training()
    for mini_batch in passed:
        _update(other_host, other_policy, mini_batch, config)
    return Passed(weights, left_alone, reference, current, gradients, loss, own_weights(other_host))


def _reference_rows(mini_batches: list[MiniBatch]) -> Found:
    """In place of an entropy, which a reference does not have, the log-prob once more."""
    return to_rows(
        mini_batches,
        [
            [TokenStatistics(*[micro.reference_logprobs] * 2) for micro in mini.micro_batches]
            for mini in mini_batches
        ],
    )


def _update(host, policy, mini_batch: MiniBatch, config: Config) -> tuple[float, Part]:
    from tepo_nemo.objectives.contract import Mean

    policy.prepare_for_training_step()
    loss, metrics = policy.get_loss_and_metrics(mini_batch, forward_only=False)
    policy.finish_training_step()
    gradients = own_gradients(host)
    share = {} if loss is None else {"loss": Mean(loss, loss.new_full((), 1 / policy.data_parallel_size))}
    assert not policy.clip_gradient(loss, metrics).not_finite
    policy.optimizer_step(config.trainer.optimizer.learning_rate)
    return policy.reduce_metrics(share)["loss"], gradients


@pytest.fixture(scope="module")
def passed(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given]
) -> Callable[[str, str], list[Passed]]:
    """`passed(layout, mode)`: what each rank found."""

    def work(layout: str) -> list[dict[str, Passed]]:
        start = given(False)
        configs = {
            mode: LAYOUTS[layout].config(toy, *start.overrides, *MODES[mode], *WITH_KL)
            for each, mode in CASES
            if each == layout
        }
        world = worlds(LAYOUTS[layout].ranks, stack="nemo")
        return world.run(two_updates, configs, start.batch, start.old, timeout=110)

    work = once(work)
    return lambda layout, mode: [found[mode] for found in work(layout)]


@every_case
def test_a_pass_leaves_every_weight_to_the_bit_and_in_its_place(
    passed: Callable[[str, str], list[Passed]], layout: str, mode: str
) -> None:
    """Also those that are views into the optimizer's buffers."""
    for found in passed(layout, mode):
        assert found.left_alone == [True, True]
        for before, after in zip(found.weights[:-1], found.weights[1:], strict=True):
            assert not same_weights(before, after), "the updates are to move the weights"


@every_case
def test_updates_are_those_of_a_host_without_passes(
    passed: Callable[[str, str], list[Passed]], layout: str, mode: str
) -> None:
    """To the bit: neither the optimizer's main weights nor its moments have seen the reference."""
    for found in passed(layout, mode):
        assert same_weights(found.weights[-1], found.without_passes)


@every_case
def test_the_reference_stays_what_the_run_started_from(
    passed: Callable[[str, str], list[Passed]], layout: str, mode: str
) -> None:
    """To the bit, while the policy moves away from it."""
    for found in passed(layout, mode):
        first, second = found.reference
        for row, (logprobs, _) in first.items():
            assert torch.equal(logprobs, second[row][0]), row
        assert max((logp - first[row][0]).abs().max() for row, (logp, _) in found.current.items()) > 1e-2


@pytest.mark.parametrize(("layout", "mode"), [(layout, mode) for layout, mode in CASES if mode in FP32])
def test_log_probs_loss_and_gradient_are_those_of_the_formula(
    passed: Callable[[str, str], list[Passed]], given: Callable[[bool], Given], layout: str, mode: str
) -> None:
    """The same model in float64, once with the weights at the start and once with those before the update."""
    start, ranks = given(False), passed(layout, mode)
    batch = start.batch
    rows = stack_rows([found.reference[1] for found in ranks], len(batch)).logprobs.double()
    weights = whole([found.weights[1] for found in ranks], vocabulary=VOCABULARY, tied=False)
    weights = {name: value.double().requires_grad_() for name, value in weights.items()}
    per_response: list[Tensor] = []
    for row in range(RESPONSES_PER_UPDATE, 2 * RESPONSES_PER_UPDATE):
        length = int(batch.response_lengths[row])
        reference, _ = response_statistics(start.weights_in_float64, batch, row)
        torch.testing.assert_close(rows[row, :length], reference.detach(), rtol=0, atol=1e-5)
        logp, _ = response_statistics(weights, batch, row)
        advantage = float(batch.advantages[row])
        ratio = (logp - start.old.logprobs[row, :length].double()).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        d = logp - reference.detach()
        per_response.append((-gain + BETA * ((-d).exp() + d - 1)).mean())
    loss = torch.stack(per_response).mean()
    gradients = torch.autograd.grad(loss, list(weights.values()))
    assert [found.loss for found in ranks] == pytest.approx([loss.item()] * len(ranks), rel=1e-5)
    actual = whole([found.gradients for found in ranks], vocabulary=VOCABULARY, tied=False)
    assert_close(actual, dict(zip(weights, gradients, strict=True)), 1e-5, "KL to the reference")


def copies_made(rank: int, world_size: int, configs: dict[str, Config]) -> dict[str, int]:
    """Copies of the weights that are kept by what a run builds."""
    from tepo_nemo.nemo import policy

    found = {}
    for name, config in configs.items():
        with patch.object(policy, "FrozenReference", wraps=policy.FrozenReference) as frozen:
            build_policy(config)
        found[name] = frozen.call_count
    return found


def test_no_copy_is_made_where_nobody_asks(worlds: Worlds, toy: ToyFolder) -> None:
    algorithms = {"tepo": ["algorithm=tepo"], "grpo": ["algorithm=grpo"], "grpo with a KL": WITH_KL}
    configs = {
        f"{name}, {mode}": toy.config(*MODES[mode], *algorithm)
        for name, algorithm in algorithms.items()
        for mode in ("sgd", "production")
    }
    (found,) = worlds(1, stack="nemo").run(copies_made, configs)
    assert found == {name: int(name.startswith("grpo with a KL")) for name in configs}
