"""Log-probability and entropy of a vocabulary that is split over the tensor-parallel ranks.

With z = logits / temperature, a rank knows of its columns and of each token the maximum m and, relative to
it, S = sum exp(z - m), D = sum exp(z - m)(z - m) and, if the target is its own, z_target - m. These four
numbers merge without loss of digits (absolute log-sum-exps and mean logits would not, at large logits):

    M = max_r m_r,  S = sum_r S_r exp(m_r - M),  D = sum_r exp(m_r - M)(D_r + S_r (m_r - M))
    log p(target) = (z_target - M) - log S          H = -sum p log p = log S - D / S

The backward needs no other rank, with p = softmax(z):

    d log p(target) / dz_j = [j = target] - p_j      dH / dz_j = -p_j (log p_j + H)
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo_nemo.parallel.gather import gather_stacked

# A forbidden token is one whose logit is -inf or below this. It gets probability 0 and gradient 0, and the
# finite value keeps 0 * -inf out of the entropy and of the gradients.
FORBIDDEN = -1e30
# Tokens are handled in chunks of about this many logits, which bounds the temporaries (two of a chunk, fp32).
CHUNK_LOGITS = 2**22


def vocab_parallel_logprob_entropy(
    logits: Tensor,
    target: Tensor,
    group: dist.ProcessGroup | None,
    *,
    temperature: float,
    vocab_size: int,
    mask: Tensor | None = None,
    entropy_requires_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, in nats.

    One all-gather of four numbers a token forward, none backward; results are bit-identical on all ranks.
    The logits are never changed; their gradient has their dtype, the arithmetic is fp32 (fp64 for fp64).

    Args:
        logits: [..., V_local], fp32, bf16 or fp64: columns rank * V_local and on of the padded vocabulary.
        target: [...] int64, ids in the whole vocabulary.
        group: the tensor-parallel ranks, or None where the vocabulary is not split.
        temperature: the sampling temperature; the distribution is softmax(logits / temperature).
        vocab_size: true size of the vocabulary; columns from it on are padding and take no part.
        mask: [...] bool, False where a token does not count: its outputs and gradients are 0 whatever its
            logits and target are.
        entropy_requires_grad: whether the entropy is differentiable.

    Returns:
        log-probability and entropy, both [...] fp32 (fp64 for fp64). A target outside the vocabulary that the
        mask does not exclude has log-probability -inf, so that the loss shows it.
    """
    assert logits.shape[:-1] == target.shape, (logits.shape, target.shape)
    assert mask is None or (mask.shape == target.shape and mask.dtype == torch.bool)
    assert temperature > 0
    columns = _Columns.of(logits.shape[-1], vocab_size, group)
    return _LogprobEntropy.apply(logits, target, mask, group, columns, temperature, entropy_requires_grad)


class _Columns(NamedTuple):
    """This rank's share of the true vocabulary: ids [first, first + width) are its columns [0, width)."""

    first: int
    width: int

    @classmethod
    def of(cls, local_size: int, vocab_size: int, group: dist.ProcessGroup | None) -> "_Columns":
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        assert 0 < vocab_size <= ranks * local_size, (vocab_size, ranks, local_size)
        first = rank * local_size
        return cls(first, min(max(vocab_size - first, 0), local_size))

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets are this rank's own, and the column of each (0 where it is not)."""
        column = target - self.first
        owned = (column >= 0) & (column < self.width)
        return owned, column.where(owned, 0)


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, mask, group, columns, temperature, entropy_requires_grad):
        local = _local_statistics(logits, target, columns, temperature)
        ranks = local.unsqueeze(0) if group is None else gather_stacked(local, group)
        maximum, log_sum, logprob, entropy = _merge(ranks)
        logprob, entropy = logprob.view(target.shape), entropy.view(target.shape)
        if mask is not None:
            logprob, entropy = logprob.where(mask, 0), entropy.where(mask, 0)
        ctx.save_for_backward(logits, target, mask, maximum, log_sum, logprob, entropy)
        ctx.columns, ctx.temperature = columns, temperature
        ctx.set_materialize_grads(False)
        if not entropy_requires_grad:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob, grad_entropy):
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None, None, None
        logits, target, mask, maximum, log_sum, logprob, entropy = ctx.saved_tensors
        # A token whose whole vocabulary is forbidden depends on no logit.
        ignored = maximum <= FORBIDDEN if mask is None else (maximum <= FORBIDDEN) | ~mask.flatten()
        logprob_scale, entropy_scale = (
            None if grad is None else (grad.flatten() / ctx.temperature).masked_fill(ignored, 0)
            for grad in (grad_logprob, grad_entropy)
        )
        owned, column = ctx.columns.locate(target.flatten())
        # The logit of a forbidden target has been replaced by a constant.
        owned &= logprob.flatten() > FORBIDDEN / 2

        width = ctx.columns.width
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        rows = gradient.view(-1, logits.shape[-1])
        rows[:, width:] = 0
        for chunk in _chunks(len(rows), width):
            log_p = _scaled(logits, chunk, width, ctx.temperature, maximum.dtype)
            log_p.sub_(maximum[chunk, None]).sub_(log_sum[chunk, None])
            slope = _slope(log_p, chunk, entropy.flatten(), logprob_scale, entropy_scale)
            if logprob_scale is not None:
                slope.scatter_add_(1, column[chunk, None], (logprob_scale * owned)[chunk, None])
            if mask is not None:  # logits of ignored tokens may be NaN, which a factor of 0 does not remove
                slope.masked_fill_(ignored[chunk, None], 0)
            rows[chunk, :width] = slope
        return gradient, None, None, None, None, None, None


def _slope(
    log_p: Tensor, chunk: slice, entropy: Tensor, logprob_scale: Tensor | None, entropy_scale: Tensor | None
) -> Tensor:
    """-p (logprob_scale + entropy_scale (log p + H)) of a chunk, in one of its two buffers."""
    p = log_p.exp()
    if entropy_scale is None:
        return p.mul_(-logprob_scale[chunk, None])
    # p times log p comes first: both factors of 0 * FORBIDDEN are finite, a scaled FORBIDDEN need not be.
    slope = log_p.add_(entropy[chunk, None]).mul_(p).mul_(-entropy_scale[chunk, None])
    return slope if logprob_scale is None else slope.sub_(p.mul_(logprob_scale[chunk, None]))


def _local_statistics(logits: Tensor, target: Tensor, columns: _Columns, temperature: float) -> Tensor:
    """[4, N]: m, S, D and z_target - m over the rank's columns; m = FORBIDDEN, S = D = 0 if it has none."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    owned, column = columns.locate(target.flatten())
    statistics = torch.zeros((4, target.numel()), dtype=dtype, device=logits.device)
    maximum, total, weighted, chosen = statistics
    maximum.fill_(FORBIDDEN)
    for chunk in _chunks(target.numel(), columns.width):
        z = _scaled(logits, chunk, columns.width, temperature, dtype)
        maximum[chunk] = z.amax(-1)
        z.sub_(maximum[chunk, None])
        chosen[chunk] = z.gather(1, column[chunk, None]).squeeze(1)
        exp = z.exp()
        total[chunk] = exp.sum(-1)
        weighted[chunk] = exp.mul_(z).sum(-1)
    chosen.masked_fill_(~owned, -torch.inf)
    return statistics


def _merge(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[ranks, 4, N] -> M, log S, log p(target), H of the whole vocabulary, [N] each."""
    maximum, total, weighted, chosen = statistics.unbind(1)
    merged_maximum = maximum.amax(0)
    shift = maximum - merged_maximum
    scale = shift.exp()
    merged_total = (total * scale).sum(0)
    merged_weighted = ((weighted + total * shift) * scale).sum(0)
    log_sum = merged_total.log()
    # A target has one owner; everywhere else it is -inf.
    return (
        merged_maximum,
        log_sum,
        (chosen + shift).amax(0) - log_sum,
        log_sum - merged_weighted / merged_total,
    )


def _chunks(count: int, width: int) -> Iterator[slice]:
    """Slices of `count` tokens of `width` logits; none where there are no logits."""
    if width == 0:
        return
    size = max(1, CHUNK_LOGITS // width)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _scaled(logits: Tensor, chunk: slice, width: int, temperature: float, dtype: torch.dtype) -> Tensor:
    """logits / temperature of a chunk of tokens, a new tensor [n, width]; forbidden tokens at FORBIDDEN."""
    if logits.is_contiguous():
        rows = logits.view(-1, logits.shape[-1])[chunk]
    else:  # flattening might copy all of it
        logits = logits.unsqueeze(0)
        tokens = torch.arange(chunk.start, chunk.stop, device=logits.device)
        rows = logits[torch.unravel_index(tokens, logits.shape[:-1])]
    return rows[:, :width].to(dtype, copy=True).div_(temperature).clamp_(min=FORBIDDEN)
