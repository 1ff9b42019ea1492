"""The weights of a running model, wherever its ranks have them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from torch import Tensor

MAIN = 0


@dataclass(frozen=True)
class _Shard:
    """A rank's box of a tensor, in the whole tensor's coordinates."""

    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...] | None:
        """The part within a box, in the whole tensor's coordinates; None where there is none."""
        starts = [max(own, other) for own, other in zip(self.offsets, offsets, strict=True)]
        stops = [
            min(own + size, other + length)
            for own, size, other, length in zip(self.offsets, self.shape, offsets, shape, strict=True)
        ]
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        return tuple(map(slice, starts, stops))


class LiveWeights:
    """Reads any part of any weight to the main rank; implements `conversion.to_huggingface.WeightReader`.

    Megatron's own description for its checkpoints says who has what, so that every layout is read alike. All
    ranks make it and read the same parts in the same order; one part at a time is on its way.
    """

    def __init__(self, model: MegatronGPTModel) -> None:
        self._own: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        state = model.sharded_state_dict()
        apply_factories(state)
        for part in nested_values(state):
            if isinstance(part, ShardedTensor) and is_main_replica(part.replica_id):
                # A checkpoint has the layer in front, a rank one layer at a time.
                values = part.data.detach().view(*(1,) * part.prepend_axis_num, *part.data.shape)
                self._own[part.key, tuple(part.global_offset)] = values
        self._shards = self._tell_all()
        self._dtype = next(model.parameters()).dtype
        self._device = torch.device(torch.cuda.current_device())

    def _tell_all(self) -> dict[str, list[_Shard]]:
        told: list[list[tuple[str, tuple[int, ...], tuple[int, ...]]]] = [
            [] for _ in range(dist.get_world_size())
        ]
        own = [(key, offsets, tuple(values.shape)) for (key, offsets), values in self._own.items()]
        dist.all_gather_object(told, own)
        shards: dict[str, list[_Shard]] = {}
        for rank, parts in enumerate(told):
            for key, offsets, shape in parts:
                shards.setdefault(key, []).append(_Shard(rank, offsets, shape))
        return shards

    @torch.no_grad()
    def read(self, key: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The part that begins at `offsets`: its values on the host of the main rank, its shape elsewhere."""
        if dist.get_rank() != MAIN:
            for shard, box in self._within(key, offsets, shape):
                if shard.rank == dist.get_rank():
                    dist.send(self._cut(key, shard, box).contiguous(), dst=MAIN)
            return torch.empty(tuple(shape), dtype=self._dtype, device="meta")
        whole, found = torch.empty(tuple(shape), dtype=self._dtype), 0
        for shard, box in self._within(key, offsets, shape):
            if shard.rank == MAIN:
                part = self._cut(key, shard, box)
            else:
                sizes = [side.stop - side.start for side in box]
                part = torch.empty(sizes, dtype=self._dtype, device=self._device)
                dist.recv(part, src=shard.rank)
            whole[_relative(box, offsets)] = part.cpu()
            found += part.numel()
        assert found == whole.numel(), (
            f"{key}: {found} of {whole.numel()} values from {offsets} on are somewhere"
        )
        return whole

    def _within(
        self, key: str, offsets: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[_Shard, tuple[slice, ...]]]:
        for shard in self._shards[key]:
            box = shard.overlap(offsets, shape)
            if box is not None:
                yield shard, box

    def _cut(self, key: str, shard: _Shard, box: tuple[slice, ...]) -> Tensor:
        return self._own[key, shard.offsets][_relative(box, shard.offsets)]


def _relative(box: tuple[slice, ...], offsets: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(side.start - first, side.stop - first) for side, first in zip(box, offsets, strict=True)
    )
