"""One rank's columns of a vocabulary: their statistics, the merge with those of other ranks, and slopes.

With z = logits / temperature, a rank knows of its columns and of each token the maximum logit m and, with
d = z - m / temperature, S = sum exp(d), D = sum exp(d) d and, if the target is its own, d_target. These four
numbers merge without loss of digits (absolute log-sum-exps and mean logits would not, at large logits). For
M = max_r m_r and s_r = (m_r - M) / temperature:

    S = sum_r S_r exp(s_r)        D = sum_r exp(s_r) (D_r + S_r s_r)
    log p(target) = d_target + s_owner - log S          H = -sum p log p = log S - D / S

The backward needs no other rank, with p = softmax(z):

    d log p(target) / dz_j = [j = target] - p_j      dH / dz_j = -p_j (log p_j + H)

Both passes read the logits once, a chunk of tokens at a time. Where it pays, the compiler fuses what is done
to a chunk.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_nemo.parallel.gather import gather_stacked

# A forbidden token is one whose logit is -inf or below this. It gets probability 0 and gradient 0, and the
# finite value keeps 0 * -inf out of the entropy and of the gradients.
FORBIDDEN = -1e30
# Logits that a chunk's temporaries hold together: on a CPU what the cache keeps, on a GPU what occupies it.
CHUNK_LOGITS = {"cpu": 2**19, "cuda": 2**24}
# Fused, a chunk has no temporaries, and larger ones save calls.
FUSED_CHUNKS = 16
# Narrower shards are not worth the seconds that the compiler takes.
FUSED_WIDTH = 8192


class Columns(NamedTuple):
    """A share of the true vocabulary: ids [first, first + width) are columns [0, width) of the logits."""

    first: int
    width: int

    @classmethod
    def of_rank(cls, local_size: int, vocab_size: int, group: dist.ProcessGroup | None) -> "Columns":
        """This rank's, where each has `local_size` columns of the padded vocabulary."""
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        assert 0 < vocab_size <= ranks * local_size, (vocab_size, ranks, local_size)
        first = rank * local_size
        return cls(first, min(max(vocab_size - first, 0), local_size))

    def locate(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets are among the columns, and the column of each (0 where it is not)."""
        column = target - self.first
        owned = (column >= 0) & (column < self.width)
        return owned, column.where(owned, 0)


class Distribution(NamedTuple):
    """What is known of each token's distribution over the whole vocabulary, [N] each."""

    maximum: Tensor  # of the logits; FORBIDDEN where every token is forbidden
    log_sum: Tensor  # log sum exp(z - maximum / temperature)
    logprob: Tensor  # of the target
    entropy: Tensor


class Slopes(NamedTuple):
    """Gradients with respect to log-prob and entropy, over the temperature, [N]; None where there is none."""

    logprob: Tensor | None
    entropy: Tensor | None


def arithmetic_dtype(logits: Tensor) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def local_statistics(
    logits: Tensor, target: Tensor, columns: Columns, temperature: float, *, fused: bool, out: Tensor
) -> None:
    """Write m, S, D and d_target of each token to `out` [4, N]; d_target is -inf where another rank's.

    Args:
        logits: [..., V_local] of N tokens, in any layout.
        target: [N].
        fused: what `is_fused` says of this rank's columns.
    """
    maximum, total, weighted, chosen = out
    if columns.width == 0:
        out.zero_()
        maximum.fill_(FORBIDDEN)
        chosen.fill_(-torch.inf)
        return
    rows_at_once = _chunk_rows(logits, columns.width, fused)
    if not fused:
        buffers = _buffers(logits, columns.width, min(rows_at_once, target.numel()))
    for chunk in _chunks(target.numel(), rows_at_once):
        rows = _rows(logits, chunk, columns.width)
        if fused:
            statistics = _compiled(_row_statistics)(_ragged(rows), temperature)
        else:
            statistics = _row_statistics(rows, temperature, *(buffer[: len(rows)] for buffer in buffers))
        maximum[chunk], total[chunk], weighted[chunk] = statistics
    owned, column = columns.locate(target)
    own = logits.gather(-1, column.view(*logits.shape[:-1], 1)).view(-1)
    torch.div(own - maximum, temperature, out=chosen)
    chosen.clamp_(min=FORBIDDEN).masked_fill_(~owned, -torch.inf)


def merge(local: Tensor, temperature: float, group: dist.ProcessGroup | None) -> Distribution:
    """The distributions over the whole vocabulary from each rank's `local_statistics`, [4, N].

    One all-gather; every rank merges the same numbers in the same order, so that results are the same bits.
    """
    ranks = local.unsqueeze(0) if group is None else gather_stacked(local, group)
    maximum, total, weighted, chosen = ranks.unbind(1)
    merged_maximum = maximum.amax(0)
    shift = ((maximum - merged_maximum) / temperature).clamp_(min=FORBIDDEN)
    scale = shift.exp()
    merged_total = (total * scale).sum(0)
    # A token of whose vocabulary all is forbidden has no distribution; these numbers are at least finite.
    merged_total.masked_fill_(merged_total == 0, 1)
    log_sum = merged_total.log()
    # A target has one owner; everywhere else it is -inf.
    logprob = (chosen + shift).amax(0) - log_sum
    entropy = log_sum - ((weighted + total * shift) * scale).sum(0) / merged_total
    return Distribution(merged_maximum, log_sum, logprob, entropy)


def write_gradient(
    gradient: Tensor,
    logits: Tensor,
    target: Tensor,
    columns: Columns,
    temperature: float,
    distribution: Distribution,
    slopes: Slopes,
    *,
    fused: bool,
    ignored: Tensor | None = None,
) -> None:
    """Write the gradient with respect to the logits.

    Args:
        gradient: [N, V_local], contiguous: a new tensor, or the memory of contiguous `logits`.
        logits: [..., V_local] of N tokens.
        fused: what `is_fused` says of this rank's columns.
        ignored: [N], tokens whose gradient is 0 although their logits may be NaN.
    """
    width = columns.width
    gradient[:, width:] = 0
    if width == 0:
        return
    in_place = gradient.data_ptr() == logits.data_ptr()
    rows_at_once = _chunk_rows(logits, width, fused)
    if not fused:
        # The gradient itself is one of the two buffers where it has the right kind.
        direct = gradient.dtype == distribution.maximum.dtype
        buffers = _buffers(logits, width, min(rows_at_once, len(gradient)))
    per_token = (distribution.maximum, distribution.log_sum, distribution.entropy, *slopes, ignored)
    for chunk in _chunks(len(gradient), rows_at_once):
        written, rows = gradient[chunk, :width], _rows(logits, chunk, width)
        numbers = [None if values is None else values[chunk] for values in per_token]
        if fused:
            matrices = [_ragged(matrix, columns=True) for matrix in ([rows] if in_place else [written, rows])]
            write = _compiled(_overwrite_row_slopes if in_place else _write_row_slopes)
            write(*matrices, temperature, *map(_ragged, numbers))
        else:
            first, second = (buffer[: len(rows)] for buffer in buffers)
            result = _row_slopes(rows, temperature, *numbers, written if direct else first, second)
            if not direct:
                written.copy_(result)
    _write_target_slopes(gradient, target, columns, distribution, slopes, ignored)


def _write_target_slopes(
    gradient: Tensor,
    target: Tensor,
    columns: Columns,
    distribution: Distribution,
    slopes: Slopes,
    ignored: Tensor | None,
) -> None:
    """Targets have a slope of their own, here without the cancellation of 1 - p."""
    owned, column = columns.locate(target)
    # The logit of a forbidden target has been replaced by a constant.
    owned = owned & (distribution.logprob > FORBIDDEN / 2)
    if ignored is not None:
        owned &= ~ignored
    logprob, entropy = distribution.logprob, distribution.entropy
    slope = torch.zeros_like(logprob)
    if slopes.logprob is not None:
        slope -= slopes.logprob * torch.expm1(logprob)
    if slopes.entropy is not None:
        slope -= slopes.entropy * logprob.exp() * (logprob + entropy)
    column = column.unsqueeze(1)
    kept = gradient.gather(1, column)
    gradient.scatter_(1, column, torch.where(owned.unsqueeze(1), slope.unsqueeze(1).to(kept.dtype), kept))


# ------------------------------------------------------------------- what is done to a chunk of rows


def _row_statistics(
    rows: Tensor, temperature: float, shifted: Tensor | None = None, exponential: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """m, S and D of each row; the two buffers are for the eager run, which would else allocate them anew."""
    # On a CPU the compiler adds a row up one after the other, where PyTorch adds pairs.
    one_by_one = torch.compiler.is_compiling() and rows.device.type == "cpu"
    accumulator = torch.float64 if one_by_one else arithmetic_dtype(rows)
    maximum = rows.amax(-1, keepdim=True).to(arithmetic_dtype(rows)).clamp(min=FORBIDDEN)
    shifted = torch.sub(rows, maximum, out=shifted).div_(temperature).clamp_(min=FORBIDDEN)
    exponential = torch.exp(shifted, out=exponential)
    total = exponential.sum(-1, dtype=accumulator)
    return maximum.squeeze(-1), total, exponential.mul_(shifted).sum(-1, dtype=accumulator)


def _row_slopes(
    rows: Tensor,
    temperature: float,
    maximum: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    logprob_slope: Tensor | None,
    entropy_slope: Tensor | None,
    ignored: Tensor | None,
    log_p: Tensor | None = None,
    p: Tensor | None = None,
) -> Tensor:
    """-p (logprob_slope + entropy_slope (log p + H)); log_p (which may be the rows) and p are buffers."""
    log_p = torch.sub(rows, maximum[:, None], out=log_p).div_(temperature).sub_(log_sum[:, None])
    if entropy_slope is None:
        slope = log_p.exp_().mul_(-logprob_slope[:, None])
    else:
        p = torch.exp(log_p.clamp_(min=FORBIDDEN), out=p)
        constant = entropy_slope * entropy
        if logprob_slope is not None:
            constant = constant + logprob_slope
        # p times log p comes first: both factors of 0 * FORBIDDEN are finite, a scaled FORBIDDEN need not be.
        slope = log_p.mul_(p).mul_(-entropy_slope[:, None]).sub_(p.mul_(constant[:, None]))
    return slope if ignored is None else slope.masked_fill_(ignored[:, None], 0)


def _write_row_slopes(written: Tensor, *arguments) -> None:
    written.copy_(_row_slopes(*arguments))


def _overwrite_row_slopes(rows: Tensor, *arguments) -> None:
    rows.copy_(_row_slopes(rows, *arguments))


# ------------------------------------------------------------------- chunks and fusion


def _rows(logits: Tensor, chunk: slice, width: int) -> Tensor:
    """The first `width` logits of a chunk of tokens, [n, width]; a view if the logits are contiguous."""
    if logits.is_contiguous():
        return logits.view(-1, logits.shape[-1])[chunk, :width]
    logits = logits.unsqueeze(0)  # flattening might copy all of it
    tokens = torch.arange(chunk.start, chunk.stop, device=logits.device)
    return logits[torch.unravel_index(tokens, logits.shape[:-1])][:, :width]


def _chunk_rows(logits: Tensor, width: int, fused: bool) -> int:
    return max(1, CHUNK_LOGITS[logits.device.type] * (FUSED_CHUNKS if fused else 1) // (2 * width))


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _buffers(logits: Tensor, width: int, rows: int) -> list[Tensor]:
    dtype = arithmetic_dtype(logits)
    return [torch.empty((rows, width), dtype=dtype, device=logits.device) for _ in range(2)]


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)


def _ragged(tensor: Tensor | None, *, columns: bool = False) -> Tensor | None:
    """The tensor, marked as one whose rows (and columns) change from call to call: one kernel serves all."""
    if tensor is not None:
        torch._dynamo.maybe_mark_dynamic(tensor, [0, 1] if columns else 0)
    return tensor


def is_fused(columns: Columns, device: torch.device) -> bool:
    """Whether the compiler fuses the arithmetic: a matter of the rank's whole share, never of a call's size.

    So a token's numbers are the same bits in every micro-batch.
    """
    return columns.width >= FUSED_WIDTH and _compiler_works(device.type)


@cache
def _compiler_works(device: str) -> bool:
    """Whether torch.compile gives code for the device; a warning says why where it does not."""
    if torch._dynamo.config.disable:  # TORCHDYNAMO_DISABLE=1
        return False
    try:
        _compiled(_row_statistics)(_ragged(torch.zeros(2, FUSED_WIDTH, device=device)), 1.0)
    except RuntimeError as error:  # of the compiler: no C++ compiler, no Triton
        reason = str(error).strip().splitlines()[0]
        warnings.warn(
            f"log-probs and entropies are computed without torch.compile, more slowly: {reason}", stacklevel=2
        )
        return False
    return True
