"""The keys and values of the sequences being generated, a row a sequence."""

from megatron.core.inference_params import InferenceParams
from torch import Tensor


class KVCache:
    """Megatron's buffers [length, rows, heads, dim], two a layer, which its first forward pass allocates.

    Args:
        rows: sequences at most.
        length: positions at most.
    """

    def __init__(self, rows: int, length: int) -> None:
        self._params = InferenceParams(max_batch_size=rows, max_sequence_length=length)

    def fits(self, rows: int, length: int) -> bool:
        """Whether so many sequences of such a length have room."""
        return rows <= self._params.max_batch_size and length <= self._params.max_sequence_length

    def at(self, row: int, position: int) -> InferenceParams:
        """What tells a forward pass that its input starts there."""
        self._params.batch_size_offset = row
        self._params.sequence_len_offset = position
        return self._params

    def copy_rows(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Row `sources[i]` as it is now becomes row `targets[i]`, its first `length` positions."""
        for buffers in self._params.key_value_memory_dict.values():
            for buffer in buffers:
                filled = buffer[:length]
                filled.index_copy_(1, targets, filled.index_select(1, sources))
