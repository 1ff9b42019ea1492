"""Log-probability and entropy from logits whose vocabulary is split over the tensor-parallel ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_nemo.parallel.vocab_shard import (
    Columns,
    Distribution,
    Slopes,
    arithmetic_dtype,
    is_fused,
    local_statistics,
    merge,
    write_gradient,
)


def vocab_parallel_logprob_entropy(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    *,
    temperature: float,
    vocab_size: int,
    mask: Tensor | None = None,
    entropy_requires_grad: bool = False,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, in nats.

    One all-gather of four numbers a token forward, none backward; results are bit-identical on all ranks.
    The gradient has the dtype of the logits, the arithmetic is fp32 (fp64 for fp64). The derivation is in
    `vocab_shard`.

    Args:
        logits: [..., V_local], fp32, bf16 or fp64: columns rank * V_local and on of the padded vocabulary.
        target: [...] int64, ids in the whole vocabulary.
        group: the tensor-parallel ranks, or None where the vocabulary is not split.
        temperature: the sampling temperature; the distribution is softmax(logits / temperature).
        vocab_size: true size of the vocabulary; columns from it on are padding and take no part.
        mask: [...] bool, False where a token does not count: its outputs and gradients are 0 whatever its
            logits and target are.
        entropy_requires_grad: whether the entropy is differentiable.
        overwrite_logits: let the backward write the gradient over the logits (contiguous ones), so that it
            takes no memory; a later look at them sees the gradient. Otherwise they are never changed.

    Returns:
        log-probability and entropy, both [...] fp32 (fp64 for fp64). A target outside the vocabulary that the
        mask does not exclude has log-probability -inf, so that the loss shows it.
    """
    assert logits.shape[:-1] == target.shape, (logits.shape, target.shape)
    assert mask is None or (mask.shape == target.shape and mask.dtype == torch.bool)
    assert temperature > 0
    assert logits.is_contiguous() or not overwrite_logits
    columns = Columns.of_rank(logits.shape[-1], vocab_size, group)
    return _LogprobEntropy.apply(
        logits, target, mask, group, columns, temperature, entropy_requires_grad, overwrite_logits
    )


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits, target, mask, group, columns, temperature, entropy_requires_grad, overwrite_logits
    ):
        local = logits.new_empty((4, target.numel()), dtype=arithmetic_dtype(logits))
        fused = is_fused(columns, logits.device)
        local_statistics(logits, target.flatten(), columns, temperature, fused=fused, out=local)
        maximum, log_sum, logprob, entropy = merge(local, temperature, group)
        logprob, entropy = logprob.view(target.shape), entropy.view(target.shape)
        if mask is not None:
            logprob, entropy = logprob.where(mask, 0), entropy.where(mask, 0)
        ctx.save_for_backward(logits, target, mask, maximum, log_sum, logprob, entropy)
        ctx.columns, ctx.temperature, ctx.fused = columns, temperature, fused
        ctx.overwrite_logits = overwrite_logits
        ctx.set_materialize_grads(False)
        if not entropy_requires_grad:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        if grad_logprob is None and grad_entropy is None:
            return (None,) * 8
        logits, target, mask, maximum, log_sum, logprob, entropy = ctx.saved_tensors
        ignored = None if mask is None else ~mask.flatten()
        gradient = (
            logits.detach()
            if ctx.overwrite_logits
            else torch.empty_like(logits, memory_format=torch.contiguous_format)
        )
        write_gradient(
            gradient.view(-1, logits.shape[-1]),
            logits,
            target.flatten(),
            ctx.columns,
            ctx.temperature,
            Distribution(maximum, log_sum, logprob.flatten(), entropy.flatten()),
            upstream_slopes(grad_logprob, grad_entropy, ctx.temperature, ignored),
            fused=ctx.fused,
            ignored=ignored,
        )
        return gradient, *(None,) * 7


def upstream_slopes(
    grad_logprob: Tensor | None, grad_entropy: Tensor | None, temperature: float, ignored: Tensor | None
) -> Slopes:
    """Gradients that arrive for log-prob and entropy, over the temperature, 0 for ignored tokens; flat."""

    def slope(grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        flat = grad.flatten() / temperature
        return flat if ignored is None else flat.masked_fill(ignored, 0)

    return Slopes(slope(grad_logprob), slope(grad_entropy))
