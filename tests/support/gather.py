"""Whole weights and gradients by global name, from what each rank of a layout has.

Ranks read their own part (`own_weights`, `own_gradients`); the test process puts the parts together (`whole`)
and holds replicas to be bit-identical on the way.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tepo_nemo.nemo.build import Host

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class Shard(NamedTuple):
    """One rank's part of a parameter or of its gradient, in fp32."""

    value: Tensor
    dim: int | None  # what tensor-parallel ranks split; None where each has all of it


class Place(NamedTuple):
    """Where a rank stands."""

    tensor: int
    pipeline: int
    data: int


class Part(NamedTuple):
    """All shards of a rank."""

    place: Place
    shards: dict[str, Shard]


def own_place() -> Place:
    """This rank's."""
    from megatron.core import parallel_state

    return Place(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )


def own_weights(host: "Host") -> Part:
    """This rank's weights."""
    return _part(host, lambda parameter: parameter)


def own_gradients(host: "Host") -> Part:
    """This rank's gradients after `finish_training_step`, averaged over data-parallel ranks."""
    if host.actor.use_mcore_dist_optim:
        for chunk in host.actor.model:
            for buffer in chunk.buffers:
                for bucket in buffer.buckets:
                    _gather_bucket(bucket.grad_data, buffer.data_parallel_group)
    return _part(host, _gradient)


def _gather_bucket(bucket: Tensor, group: torch.distributed.ProcessGroup) -> None:
    """The distributed optimizer reduces to each rank its share of a bucket; give every rank all of it."""
    size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    own = bucket.view(size, -1)[rank].clone()
    torch.distributed.all_gather_into_tensor(bucket, own, group=group)


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    """Where the optimizer keeps its own, `main_grad`."""
    gradient = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def _part(host: "Host", read: Callable[[torch.nn.Parameter], Tensor]) -> Part:
    shards = {}
    for chunk in host.actor.get_model_module_list():
        # Stages count their layers from 0, a layer knows its number in the whole model, from 1.
        numbers = {
            f"decoder.layers.{i}.": layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)
        }
        for name, parameter in chunk.named_parameters():
            for prefix, number in numbers.items():
                if name.startswith(prefix):
                    name = f"decoder.layers.{number}.{name.removeprefix(prefix)}"
                    break
            split = getattr(parameter, "tensor_model_parallel", False)
            shards[name] = Shard(
                read(parameter).detach().float().clone(), parameter.partition_dim if split else None
            )
    return Part(own_place(), shards)


def whole(parts: Sequence[Part], *, vocabulary: int, tied: bool) -> dict[str, Tensor]:
    """Put the parts of all ranks together.

    Rows that pad the vocabulary are cut off, and so is the last stage's copy of a tied embedding.
    """
    by_place = {part.place: part.shards for part in parts}
    for place, shards in by_place.items():
        _assert_equal(shards, by_place[place._replace(data=0)], f"data-parallel rank {place.data}")
    values: dict[str, Tensor] = {}
    for stage in sorted({place.pipeline for place in by_place}):
        ranks = [by_place[place] for place in sorted(by_place) if place.pipeline == stage and place.data == 0]
        values |= {name: _join(name, [shards[name] for shards in ranks]) for name in ranks[0]}
    values |= {name: values[name][:vocabulary] for name in (EMBEDDING, OUTPUT) if name in values}
    if tied and OUTPUT in values:
        copy = values.pop(OUTPUT)
        assert torch.equal(copy, values[EMBEDDING]), "the tied embedding differs between first and last stage"
    return values


def _join(name: str, shards: Sequence[Shard]) -> Tensor:
    first = shards[0]
    if first.dim is None:
        assert all(torch.equal(shard.value, first.value) for shard in shards), (
            f"{name} differs between TP ranks"
        )
        return first.value
    if "linear_fc1" in name:
        # A gated activation: each rank has its rows of the gate on top of its rows of the other projection.
        halves = [shard.value.chunk(2, dim=first.dim) for shard in shards]
        return torch.cat(
            [torch.cat(half, dim=first.dim) for half in zip(*halves, strict=True)], dim=first.dim
        )
    return torch.cat([shard.value for shard in shards], dim=first.dim)


def _assert_equal(shards: Mapping[str, Shard], other: Mapping[str, Shard], where: str) -> None:
    for name, shard in shards.items():
        assert torch.equal(shard.value, other[name].value), f"{name} differs on {where}"
