"""From a `TrainBatch` to this rank's micro-batches: shift, pad, count, shard.

Responses are never split. Denominators are counted here over the whole mini-batch, before any forward:
every rank holds the whole `TrainBatch`, so that counting needs no communication.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import MinibatchTotals
from tepo_nemo.training.batch import MicroBatch, MiniBatch, TrainBatch

_PAD = 0  # any valid id: padding is masked, and causal attention never looks right


def shifted_sequences(
    prompts: Sequence[Sequence[int]], responses: Tensor, lengths: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and mask of next-token prediction, [S, width] each.

    The target of position l is token l + 1 of prompt + response; the mask is True where that is a response
    token. The first response token is the target of the prompt's last token.

    Args:
        prompts: S prompts of at least one token.
        responses: [S, T] int64.
        lengths: [S] int64, tokens of each response.
        width: at least the longest prompt + response, less one.
    """
    sequences = torch.full((len(prompts), width + 1), _PAD, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, (prompt, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
        sequences[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64)
        sequences[row, len(prompt) : len(prompt) + length] = responses[row, :length]
        mask[row, len(prompt) - 1 : len(prompt) - 1 + length] = True
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous(), mask


def build_mini_batches(
    batch: TrainBatch,
    *,
    responses_per_update: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    length_multiple: int,
    max_response_length: int,
) -> list[MiniBatch]:
    """Cut the batch into mini-batches and return this rank's share of each.

    A batch shorter than one mini-batch is filled with fully masked responses, so that every rank runs the
    same number of micro-batches. All micro-batches of a step have one shape.
    """
    width = max(
        len(prompt) + length - 1
        for prompt, length in zip(batch.prompt_tokens, batch.response_lengths.tolist(), strict=True)
    )
    width = max(1, -(-width // length_multiple)) * length_multiple
    rows = torch.arange(len(batch))
    if len(rows) < responses_per_update:
        rows = torch.nn.functional.pad(rows, (0, responses_per_update - len(rows)), value=-1)
    assert len(rows) % responses_per_update == 0, "a step trains on whole mini-batches"
    assert responses_per_update % (data_parallel_size * micro_batch_size) == 0, "micro-batches are equal"
    share = responses_per_update // data_parallel_size

    mini_batches = []
    for update_rows in rows.split(responses_per_update):
        trained = update_rows[update_rows >= 0]
        tokens_per_group = torch.zeros(int(batch.groups.max()) + 1, dtype=torch.int64)
        tokens_per_group.index_add_(0, batch.groups[trained], batch.response_lengths[trained])
        totals = MinibatchTotals(
            tokens=int(batch.response_lengths[trained].sum()),
            responses=int((batch.response_lengths[trained] > 0).sum()),
            groups=int((tokens_per_group > 0).sum()),
            max_response_length=max_response_length,
        )
        own = update_rows[data_parallel_rank * share : (data_parallel_rank + 1) * share]
        micro_batches = [
            _micro_batch(batch, micro_rows, tokens_per_group, width)
            for micro_rows in own.split(micro_batch_size)
        ]
        mini_batches.append(MiniBatch(micro_batches, totals))
    return mini_batches


def _micro_batch(batch: TrainBatch, rows: Tensor, tokens_per_group: Tensor, width: int) -> MicroBatch:
    padding = rows < 0
    source = rows.clamp(min=0)
    inputs, targets, mask = shifted_sequences(
        [batch.prompt_tokens[row] for row in source.tolist()],
        batch.response_tokens[source],
        batch.response_lengths[source],
        width,
    )
    mask[padding] = False
    return MicroBatch(
        inputs=inputs,
        targets=targets,
        mask=mask,
        advantages=batch.advantages[source, None].expand_as(mask).contiguous(),
        group_tokens=tokens_per_group[batch.groups[source]].float(),
        rows=rows,
    )
