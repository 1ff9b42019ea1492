"""Bytes that a built host holds, counted by its tensors."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from support.steps import first_mini_batch, take_step
from support.synthetic import Rows
from support.toy import build_policy
from torch import Tensor
from torch.optim import Optimizer

from tepo_nemo.config.schema import Config
from tepo_nemo.rollout.protocol import GenerationRequest
from tepo_nemo.training.batch import TrainBatch

if TYPE_CHECKING:  # the ranks alone have the stack
    from tepo_nemo.nemo.build import Host


def measure_bytes(
    rank: int, world_size: int, configs: Sequence[Config], batch: TrainBatch, old: Rows
) -> list[dict[str, int]]:
    """Of each configuration, after an update: its weights, gradients and optimizer state on this rank."""
    found = []
    for config in configs:
        host, policy = build_policy(config)
        take_step(host, policy, first_mini_batch(policy, batch, old), learning_rate=1e-3)
        found.append(_bytes_of(host))
    return found


def count_numbers(
    rank: int, world_size: int, configs: Sequence[Config], request: GenerationRequest
) -> list[tuple[int, int]]:
    """Of each configuration: parameters of this rank, and bytes of keys and values after the request."""
    found = []
    for config in configs:
        host, policy = build_policy(config)
        policy.prepare_for_inference()
        policy.infer(request)
        cache = host.actor.rollout._cache._params.key_value_memory_dict.values()
        parameters = sum(each.numel() for each in host.actor.parameters())
        found.append((parameters, sum(each.nbytes for pair in cache for each in pair)))
    return found


def _bytes_of(host: "Host") -> dict[str, int]:
    parameters = [each for chunk in host.actor.get_model_module_list() for each in chunk.parameters()]
    gradients = [getattr(each, "main_grad", each.grad) for each in parameters]
    weights = _storages(parameters)
    state = {
        place: size
        for place, size in _storages(_state(host.optimizer)).items()
        if place not in weights  # an optimizer without main weights works on views of the model's
    }
    return {
        "weights": sum(weights.values()),
        "gradients": sum(_storages(gradients).values()),
        "optimizer": sum(state.values()),
    }


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the memory behind tensors, each once, by address."""
    return {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors
        if each is not None
    }


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    """What it updates, and what it remembers."""
    if hasattr(optimizer, "mcore_optimizer"):
        optimizer = optimizer.mcore_optimizer.optimizer
    for group in optimizer.param_groups:
        yield from group["params"]
    for remembered in optimizer.state.values():
        yield from (value for value in remembered.values() if isinstance(value, Tensor))
