"""The operator on one shard, and its float64 reference: a token at a time, on the whole vocabulary."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_nemo.parallel.vocab import vocab_parallel_logprob_entropy


@dataclass(frozen=True)
class Case:
    logits: Tensor  # [..., V], all columns that the ranks hold together
    target: Tensor  # [...]
    vocab_size: int
    temperature: float = 1.0
    mask: Tensor | None = None
    logprob_weight: Tensor | None = None  # [...], the loss is the sum of weight * output
    entropy_weight: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    logprob: Tensor
    entropy: Tensor
    gradient: Tensor | None  # of the loss with respect to logits: of one shard, or of all columns


def evaluate(rank: int, world_size: int, case: Case) -> Outcome:
    """Forward and backward on the rank's shard."""
    group = dist.group.WORLD if dist.is_initialized() else None
    logits = (
        case.logits.chunk(world_size, dim=-1)[rank]
        .clone(memory_format=torch.preserve_format)
        .requires_grad_()
    )
    logprob, entropy = vocab_parallel_logprob_entropy(
        logits, case.target, group, temperature=case.temperature, vocab_size=case.vocab_size, mask=case.mask,
        entropy_requires_grad=case.entropy_weight is not None,
    )  # fmt: skip
    _loss(case, logprob, entropy).backward()
    return Outcome(logprob.detach(), entropy.detach(), logits.grad)


def join(outcomes: list[Outcome]) -> Outcome:
    """The shards' gradients side by side; log-probability and entropy must be the same bits on all ranks."""
    first = outcomes[0]
    for other in outcomes[1:]:
        torch.testing.assert_close(other.logprob, first.logprob, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(other.entropy, first.entropy, rtol=0, atol=0, equal_nan=True)
    return Outcome(
        first.logprob, first.entropy, torch.cat([outcome.gradient for outcome in outcomes], dim=-1)
    )


def dense(case: Case) -> Outcome:
    """Columns of probability 0 (padding, -inf) are cut out before the softmax, masked tokens left out."""
    logits = case.logits.double().requires_grad_()
    columns = torch.arange(logits.shape[-1])
    mask = torch.ones_like(case.target, dtype=torch.bool) if case.mask is None else case.mask
    logprobs, entropies = [], []
    tokens = zip(logits.flatten(0, -2), case.target.flatten(), mask.flatten(), strict=True)
    for row, target, counts in tokens:
        if counts:
            allowed = (columns < case.vocab_size) & (row > -torch.inf)
            log_p = (row[allowed] / case.temperature).log_softmax(-1)
            logprobs.append(log_p[columns[allowed] == target].sum())
            entropies.append(-(log_p.exp() * log_p).sum())
        else:
            logprobs.append(row[:0].sum())
            entropies.append(row[:0].sum())
    logprob, entropy = (torch.stack(values).view(case.target.shape) for values in (logprobs, entropies))
    _loss(case, logprob, entropy).backward()
    return Outcome(logprob.detach(), entropy.detach(), logits.grad)


def _loss(case: Case, logprob: Tensor, entropy: Tensor) -> Tensor:
    terms = [(case.logprob_weight, logprob), (case.entropy_weight, entropy)]
    return sum((weight.to(value.dtype) * value).sum() for weight, value in terms if weight is not None)
