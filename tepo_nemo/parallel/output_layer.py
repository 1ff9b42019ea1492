"""From hidden states to log-probability and entropy, without the logits ever being there as a whole."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_nemo.parallel.vocab import upstream_slopes
from tepo_nemo.parallel.vocab_shard import (
    Columns,
    Distribution,
    arithmetic_dtype,
    is_fused,
    local_statistics,
    merge,
    write_gradient,
)

# Logits of a block, which is all that is there of them at a time; large enough for fast matrix products.
BLOCK_LOGITS = {"cpu": 2**22, "cuda": 2**26}


def fused_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    *,
    temperature: float,
    vocab_size: int,
    entropy_requires_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, in nats, from hidden states.

    The values of `vocab_parallel_logprob_entropy(hidden @ weight.T, ...)` with memory for a block of logits.
    Forward, logits are made a block of tokens at a time; backward, they are made again a block of the
    vocabulary at a time, so that a block's weight gradient is one matrix product over all tokens, accumulated
    in fp32, and only the small hidden gradient adds up over blocks (in fp32).

    Args:
        hidden: [N, H], after the final norm; equal on all ranks of `group`.
        weight: [V_local, H], this rank's rows of the output layer.
        target: [N] int64, ids in the whole vocabulary.
        group: the tensor-parallel ranks, or None where the vocabulary is not split.
        temperature, vocab_size, entropy_requires_grad: as for `vocab_parallel_logprob_entropy`.

    Returns:
        log-probability and entropy, both [N] fp32 (fp64 for fp64). The gradient of `hidden` is this rank's
        part of it: its sum over `group` is the caller's to take.
    """
    assert hidden.ndim == weight.ndim == 2 and hidden.shape[1] == weight.shape[1], (
        hidden.shape,
        weight.shape,
    )
    assert hidden.dtype == weight.dtype, (hidden.dtype, weight.dtype)
    assert target.shape == hidden.shape[:1], (hidden.shape, target.shape)
    assert temperature > 0
    columns = Columns.of_rank(len(weight), vocab_size, group)
    return _FusedLogprobEntropy.apply(
        hidden, weight, target, group, columns, temperature, entropy_requires_grad
    )


class _FusedLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, group, columns, temperature, entropy_requires_grad):
        local = hidden.new_empty((4, len(target)), dtype=arithmetic_dtype(hidden))
        fused = is_fused(columns, hidden.device)
        rows = weight[: columns.width].t()
        for tokens in _blocks(len(target), columns.width, hidden.device):
            logits = hidden[tokens] @ rows
            local_statistics(logits, target[tokens], columns, temperature, fused=fused, out=local[:, tokens])
        distribution = merge(local, temperature, group)
        ctx.save_for_backward(hidden, weight, target, *distribution)
        ctx.columns, ctx.temperature, ctx.fused = columns, temperature, fused
        ctx.set_materialize_grads(False)
        if not entropy_requires_grad:
            ctx.mark_non_differentiable(distribution.entropy)
        return distribution.logprob, distribution.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        if grad_logprob is None and grad_entropy is None:
            return (None,) * 7
        hidden, weight, target, *saved = ctx.saved_tensors
        distribution = Distribution(*saved)
        slopes = upstream_slopes(grad_logprob, grad_entropy, ctx.temperature, ignored=None)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.zeros_like(hidden, dtype=arithmetic_dtype(hidden)) if needs_hidden else None
        weight_gradient = torch.empty_like(weight) if needs_weight else None
        if needs_weight:
            weight_gradient[ctx.columns.width :] = 0
        for block in _blocks(ctx.columns.width, len(target), hidden.device):
            rows = weight[block]
            logits = hidden @ rows.t()
            columns = Columns(ctx.columns.first + block.start, len(rows))
            write_gradient(
                logits, logits, target, columns, ctx.temperature, distribution, slopes, fused=ctx.fused
            )
            if needs_hidden:
                hidden_gradient += logits @ rows
            if needs_weight:
                torch.mm(logits.t(), hidden, out=weight_gradient[block])
        if needs_hidden:
            hidden_gradient = hidden_gradient.to(hidden.dtype)
        return hidden_gradient, weight_gradient, *(None,) * 5


def _blocks(count: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of `count` rows that are `width` wide, of about equal size."""
    blocks = max(1, -(-count * width // BLOCK_LOGITS[device.type]))
    size = max(1, -(-count // blocks))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
