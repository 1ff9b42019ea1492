"""What is measured: modes, inputs of a rank, one run on them, and the right answer in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

CHECKED = 16  # so many tokens, the first ones, have their gradients checked
HARD = 5  # so many of them, the first ones, have logits where digits are lost
_CHUNK = 16  # tokens at a time in float64
_ENTROPY_SEED = 0.1  # d loss / d entropy of each token


class Mode(str, Enum):
    NO_GRADIENT = "no gradient"
    LOGPROB = "log-prob gradient"
    BOTH = "both gradients"

    @property
    def trains(self) -> bool:
        return self is not Mode.NO_GRADIENT


@dataclass(frozen=True)
class Problem:
    """One rank's inputs: (logits [N, V_local],), or (hidden [N, h], weight [V_local, h]) of a layer."""

    inputs: tuple[Tensor, ...]
    target: Tensor  # [N] int64, the same on all ranks
    logprob_seed: Tensor  # [N], d loss / d log-prob
    vocab_size: int
    group: dist.ProcessGroup

    @property
    def tokens(self) -> int:
        return len(self.target)

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def local_vocab(self) -> int:
        return self.vocab_size // self.ranks

    @property
    def first_column(self) -> int:
        return dist.get_rank(self.group) * self.local_vocab

    @property
    def hard(self) -> int:
        """So many tokens, the first ones, have logits where digits are lost."""
        return HARD if len(self.inputs) == 1 else 0

    @property
    def split_group(self) -> dist.ProcessGroup | None:
        """None where the vocabulary is not split."""
        return None if self.ranks == 1 else self.group

    def logits(self, rows: slice) -> Tensor:
        """Columns of this rank in float64."""
        if len(self.inputs) == 1:
            return self.inputs[0][rows].double()
        hidden, weight = self.inputs
        return hidden[rows].double() @ weight.double().T


def make_problem(
    tokens: int, vocab_size: int, group: dist.ProcessGroup, hidden_size: int | None = None, seed: int = 1
) -> Problem:
    """Normal logits of deviation 2, the first rows hard; or, with a hidden size, an output layer like it."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    assert vocab_size % ranks == 0
    local = vocab_size // ranks
    common, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1000 * seed + rank)
    target = torch.randint(vocab_size, (tokens,), generator=common)
    logprob_seed = torch.randn(tokens, generator=common)
    if hidden_size is None:
        logits = torch.randn(tokens, local, generator=own).mul_(2)
        _harden(logits, target - rank * local)
        inputs = (logits,)
    else:
        hidden = torch.randn(tokens, hidden_size, generator=common)
        inputs = (hidden, torch.randn(local, hidden_size, generator=own).mul_(2 / hidden_size**0.5))
    return Problem(inputs, target, logprob_seed, vocab_size, group)


def _harden(logits: Tensor, column: Tensor) -> None:
    logits[0] += 1e4
    logits[1] -= 1e4
    logits[2] *= 5e3  # about +-1e4
    logits[3] *= 15
    if 0 <= column[4] < logits.shape[1]:  # one-hot at the target
        logits[4, column[4]] += 1e4


class Run:
    """One run of an implementation. Those that write into their logits get a copy, made before the clock."""

    def __init__(self, implementation: "Implementation", mode: Mode, problem: Problem) -> None:
        self.leaves = tuple(tensor.detach().requires_grad_(mode.trains) for tensor in problem.inputs)
        self.work = tuple(leaf.clone() for leaf in self.leaves) if implementation.mutates else self.leaves
        self._implementation, self._mode, self._problem = implementation, mode, problem
        self.logprob: Tensor | None = None
        self.entropy: Tensor | None = None
        self.gradients: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        with torch.set_grad_enabled(self._mode.trains), self._implementation.context():
            self.logprob, self.entropy = self._implementation.call(self.work, self._problem, self._mode)

    def backward(self) -> None:
        if not self._mode.trains:
            return
        outputs, seeds = [self.logprob], [self._problem.logprob_seed]
        if self._mode is Mode.BOTH:
            outputs.append(self.entropy)
            seeds.append(self._entropy_seed())
        # No accumulation into .grad, which could copy.
        with self._implementation.context():
            self.gradients = torch.autograd.grad(outputs, self.leaves, seeds)

    def _entropy_seed(self) -> Tensor:
        if self.entropy.dim() > 0:
            return torch.full_like(self.entropy, _ENTROPY_SEED)
        return torch.full_like(self.entropy, _ENTROPY_SEED * (self._problem.tokens - 1))  # a mean, see there


@dataclass(frozen=True)
class Implementation:
    """One implementation behind the signature of all: `call(inputs, problem, mode)` -> log-prob, entropy.

    Entropy is [N], or one number (the mean of all tokens but the last), or None where it is not computed.
    """

    name: str
    note: str
    call: Callable[[tuple[Tensor, ...], Problem, Mode], tuple[Tensor, Tensor | None]]
    gives_entropy: bool = True
    gives_logprob: bool = True
    mutates: bool = False
    compiled: bool = False  # whether torch.compile hides its operators from those who watch them
    context: Callable[[], AbstractContextManager] = nullcontext  # of forward and backward

    @property
    def modes(self) -> tuple[Mode, ...]:
        if not self.gives_logprob:
            return (Mode.NO_GRADIENT,)
        return tuple(Mode) if self.gives_entropy else (Mode.NO_GRADIENT, Mode.LOGPROB)


@dataclass(frozen=True)
class Reference:
    """Log-prob and entropy of all tokens, in float64."""

    logprob: Tensor
    entropy: Tensor
    log_sum: Tensor

    @classmethod
    def of(cls, problem: Problem) -> "Reference":
        chunks = [
            _reference_chunk(problem, slice(start, min(start + _CHUNK, problem.tokens)))
            for start in range(0, problem.tokens, _CHUNK)
        ]
        return cls(*(torch.cat(column) for column in zip(*chunks, strict=True)))

    def gradient(self, problem: Problem, mode: Mode) -> Tensor:
        """d loss / d first input of the checked tokens: own columns, or own part for hidden states."""
        rows = slice(0, min(CHECKED, problem.tokens - 1))  # some means leave out the last token
        log_p = problem.logits(rows) - self.log_sum[rows, None]
        p = log_p.exp()
        gradient = -p * problem.logprob_seed[rows, None]
        if mode is Mode.BOTH:
            gradient -= _ENTROPY_SEED * p * (log_p + self.entropy[rows, None])
        columns = torch.arange(problem.local_vocab) + problem.first_column
        gradient += (columns == problem.target[rows, None]) * problem.logprob_seed[rows, None]
        return gradient if len(problem.inputs) == 1 else gradient @ problem.inputs[1].double()


def _reference_chunk(problem: Problem, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    logits = problem.logits(rows)
    maximum = logits.amax(1)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=problem.group)
    shifted = logits - maximum[:, None]
    p = shifted.exp()
    column = problem.target[rows] - problem.first_column
    own = (column >= 0) & (column < problem.local_vocab)
    chosen = shifted.gather(1, column.where(own, 0)[:, None])[:, 0].where(own, 0)
    sums = torch.stack([p.sum(1), (p * shifted).sum(1), chosen])
    dist.all_reduce(sums, group=problem.group)
    total, weighted, chosen = sums
    return chosen - total.log(), total.log() - weighted / total, maximum + total.log()


def largest_error(found: Tensor, right: Tensor) -> float:
    """max |found - right| / max(1, |right|); NaN or infinite where `found` is."""
    if found.numel() == 0:
        return 0.0
    return ((found.double() - right).abs() / right.abs().clamp(min=1)).max().item()
