"""From a `TrainBatch` to this rank's micro-batches: shift, count, share out, pad.

Responses are never split. Denominators are counted here over the whole mini-batch, before any forward:
every rank holds the whole `TrainBatch`, so that counting needs no communication.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tepo_nemo.objectives.contract import MinibatchTotals
from tepo_nemo.training.balance import MicroBatchLimits, share_out
from tepo_nemo.training.batch import MicroBatch, MiniBatch, TrainBatch

_PAD = 0  # any valid id: padding is masked, and causal attention never looks right


def shifted_sequences(
    prompts: Sequence[Sequence[int]], responses: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, targets and mask of next-token prediction, and the column of each response token.

    The target of position l is token l + 1 of prompt + response; the mask is True where that is a response
    token. The first response token is the target of the prompt's last token.

    Args:
        prompts: S prompts of at least one token.
        responses: [S, T] int64.
        lengths: [S] int64, tokens of each response.

    Returns:
        [S, L] each, with L one less than the longest prompt + response (but at least 1). The column is that
        of the target in `responses`; any valid one where the mask is False.
    """
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = max(2, int((prompt_lengths + lengths).max()))
    tokens = pad_sequence(
        [torch.as_tensor(prompt, dtype=torch.int64) for prompt in prompts], batch_first=True
    )
    tokens = torch.nn.functional.pad(tokens, (0, max(0, width - tokens.shape[1])), value=_PAD)[:, :width]
    column = torch.arange(width) - prompt_lengths[:, None]
    in_response = (column >= 0) & (column < lengths[:, None])
    if responses.shape[1] == 0:
        responses = torch.zeros(len(responses), 1, dtype=torch.int64)
    column = column.clamp(0, responses.shape[1] - 1)
    tokens = torch.where(in_response, responses.gather(1, column), tokens)
    return tokens[:, :-1], tokens[:, 1:], in_response[:, 1:], column[:, 1:]


def build_mini_batches(
    batch: TrainBatch,
    *,
    responses_per_update: int,
    limits: MicroBatchLimits,
    attention_length: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    max_response_length: int,
) -> list[MiniBatch]:
    """Cut the batch into mini-batches and return this rank's share of each.

    A batch shorter than one mini-batch is one. Responses that are not trained on are left out, and each
    micro-batch is padded to its own longest sequence.

    Args:
        limits, attention_length: see `balance.share_out`.
    """
    assert len(batch) <= responses_per_update or len(batch) % responses_per_update == 0, (
        "a step trains on whole mini-batches"
    )
    sequences = _Sequences(batch)
    mini_batches = []
    for rows in torch.arange(len(batch)).split(responses_per_update):
        lengths, groups = batch.response_lengths[rows], batch.groups[rows]
        tokens_per_group = torch.zeros(int(batch.groups.max()) + 1, dtype=torch.int64)
        tokens_per_group.index_add_(0, groups, lengths)
        totals = MinibatchTotals(
            tokens=int(lengths.sum()),
            responses=int((lengths > 0).sum()),
            groups=int((tokens_per_group > 0).sum()),
            max_response_length=max_response_length,
        )
        trained = rows[lengths > 0]
        shares = share_out(sequences.lengths[trained].tolist(), data_parallel_size, limits, attention_length)
        micro_batches = [
            sequences.micro_batch(trained[own], tokens_per_group, limits.length_multiple)
            for own in shares[data_parallel_rank]
        ]
        mini_batches.append(MiniBatch(micro_batches, totals))
    return mini_batches


class _Sequences:
    """The whole batch, shifted once; micro-batches are cut out of it."""

    def __init__(self, batch: TrainBatch) -> None:
        self._batch = batch
        self._inputs, self._targets, self._mask, column = shifted_sequences(
            batch.prompt_tokens, batch.response_tokens, batch.response_lengths
        )
        self._sampled_logprobs = (
            None
            if batch.sampled_logprobs is None
            else batch.sampled_logprobs.gather(1, column).masked_fill_(~self._mask, 0)
        )
        # A sequence takes the positions up to its last trained target; none if nothing of it is trained.
        last = self._mask.shape[1] - self._mask.flip(1).int().argmax(1)
        self.lengths = torch.where(self._mask.any(1), last, 0)

    def micro_batch(self, rows: Tensor, tokens_per_group: Tensor, multiple: int) -> MicroBatch:
        """Some rows, padded to a multiple; a single masked one where there are none."""
        if len(rows) == 0:
            rows, source, longest = torch.tensor([-1]), torch.tensor([0]), 0
        else:
            source, longest = rows, int(self.lengths[rows].max())
        width = max(1, -(-longest // multiple)) * multiple

        def cut(values: Tensor) -> Tensor:
            values = values[source, :width]
            return torch.nn.functional.pad(values, (0, width - values.shape[1]))

        mask = cut(self._mask) & (rows >= 0)[:, None]
        return MicroBatch(
            inputs=cut(self._inputs),
            targets=cut(self._targets),
            mask=mask,
            lengths=torch.where(rows >= 0, self.lengths[source], 0),
            positions=mask.flatten().nonzero().squeeze(1),
            advantages=self._batch.advantages[source, None].expand(mask.shape).contiguous(),
            group_tokens=tokens_per_group[self._batch.groups[source]].float(),
            rows=rows,
            sampled_logprobs=None if self._sampled_logprobs is None else cut(self._sampled_logprobs),
        )
