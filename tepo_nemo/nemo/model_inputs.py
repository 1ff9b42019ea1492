"""How a micro-batch enters the model: a padded row a sequence, or all sequences in one row."""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from tepo_nemo.training.batch import MicroBatch


@dataclass(frozen=True)
class ModelInputs:
    """Arguments of the model, on the device, and where its hidden states are those of the trained tokens."""

    input_ids: Tensor  # [rows, length]
    position_ids: Tensor  # [rows, length]
    packed_seq_params: PackedSeqParams | None
    places: Tensor  # [n], of the micro-batch's trained tokens among the flat hidden states [length * rows]


def padded_inputs(micro_batch: MicroBatch) -> ModelInputs:
    """A row a sequence. Attention is causal without a mask, and nothing valid stands right of a response.

    Args:
        micro_batch: on the device.
    """
    rows, length = micro_batch.inputs.shape
    # Megatron's hidden states have the position first.
    places = micro_batch.positions % length * rows + micro_batch.positions // length
    return ModelInputs(
        micro_batch.inputs,
        torch.arange(length, device=places.device).expand(rows, -1),
        None,
        places,
    )


def packed_inputs(micro_batch: MicroBatch, device: torch.device, length_multiple: int) -> ModelInputs:
    """All sequences one after the other in one row, whose attention stays within each (TE's `thd` format).

    Args:
        micro_batch: on the host, where its lengths are known without waiting for the device.
        length_multiple: the row is filled up to a multiple of this by a sequence of padding.
    """
    lengths = micro_batch.lengths.clamp(min=1)
    length = micro_batch.inputs.shape[1]
    columns = torch.arange(length).expand_as(micro_batch.inputs)
    filled = columns < lengths[:, None]
    padding = -int(lengths.sum()) % length_multiple
    if padding:
        lengths = torch.cat([lengths, torch.tensor([padding])])

    def fill_up(values: Tensor) -> Tensor:
        return torch.cat([values, torch.arange(padding)])[None].to(device)

    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32).to(device)
    longest = int(lengths.max())
    places = (filled.flatten().cumsum(0) - 1)[micro_batch.positions]
    return ModelInputs(
        fill_up(micro_batch.inputs[filled]),
        fill_up(columns[filled]),
        PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        places.to(device),
    )
