"""One adapter an implementation: what production code does around the functions, and nothing else."""

import importlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import Tensor

from tepo_nemo.bench import peers
from tepo_nemo.bench.problem import Implementation, Mode, Problem
from tepo_nemo.parallel import vocab_shard
from tepo_nemo.parallel.output_layer import fused_logprob_entropy
from tepo_nemo.parallel.vocab import vocab_parallel_logprob_entropy

OURS = "tepo_nemo"
OVERWRITING = "tepo_nemo (overwrite_logits)"
EAGER = "tepo_nemo (eager)"
LOGSUMEXP = "torch.logsumexp"
NEMO_ALIGNER = "NeMo-Aligner"
VERL = "verl"
VERL_AS_USED = "verl as used"
TRL = "TRL"
PEERS_WITH_BOTH = (NEMO_ALIGNER, VERL, VERL_AS_USED, TRL)  # log-prob and entropy
FUSED = "tepo_nemo fused"

Built = tuple[list[Implementation], dict[str, str]]


def implementations_of_logits(ranks: int) -> Built:
    """From logits to log-prob and entropy: what can be measured, and why the others cannot."""
    return _build(
        {
            OURS: _ours,
            OVERWRITING: _overwriting,
            EAGER: _eager,
            LOGSUMEXP: _logsumexp,
            NEMO_ALIGNER: _nemo_aligner,
            "megatron-core": _megatron,
            "megatron-core fused": _megatron_fused,
            VERL: _verl,
            VERL_AS_USED: _verl_as_used,
            TRL: lambda name: _trl(name, ranks),
        }
    )


def implementations_of_output_layer(ranks: int) -> Built:
    """From hidden states to log-prob and entropy."""
    return _build(
        {
            FUSED: _fused,
            f"linear + {OURS}": lambda name: _after_linear(name, _ours(name)),
            f"linear + {NEMO_ALIGNER}": lambda name: _after_linear(name, _nemo_aligner(name)),
            f"linear + {VERL}": lambda name: _after_linear(name, _verl(name)),
            f"{TRL} chunked": lambda name: _trl_chunked(name, ranks),
        }
    )


def _build(builders: Mapping[str, Callable[[str], Implementation]]) -> Built:
    built, absent = [], {}
    for name, builder in builders.items():
        try:
            built.append(builder(name))
        except peers.Absent as reason:
            absent[name] = str(reason)
    return built, absent


def _ours(name: str) -> Implementation:
    return Implementation(name, "compiled where a C++ compiler is found", _call_ours, compiled=True)


def _overwriting(name: str) -> Implementation:
    def call(inputs, problem, mode):
        return _call_ours(inputs, problem, mode, overwrite_logits=True)

    return Implementation(
        name, "the gradient takes the place of the logits", call, mutates=True, compiled=True
    )


def _call_ours(inputs: tuple[Tensor, ...], problem: Problem, mode: Mode, **options: bool):
    return vocab_parallel_logprob_entropy(
        inputs[0],
        problem.target,
        problem.split_group,
        temperature=1.0,
        vocab_size=problem.vocab_size,
        entropy_requires_grad=mode is Mode.BOTH,
        **options,
    )


def _eager(name: str) -> Implementation:
    return Implementation(name, "without torch.compile", _call_ours, context=_uncompiled)


def _uncompiled() -> AbstractContextManager:
    """No shard is wide enough for the compiler; so both ways can take turns in one process."""
    return mock.patch.object(vocab_shard, "FUSED_WIDTH", math.inf)


def _logsumexp(name: str) -> Implementation:
    def call(inputs, problem, mode):
        return torch.logsumexp(inputs[0], -1), None

    return Implementation(
        name, "of a rank's own logits, for scale", call, gives_entropy=False, gives_logprob=False
    )


def _nemo_aligner(name: str) -> Implementation:
    from nemo_aligner.utils import distributed

    def call(inputs, problem, mode):
        logits = inputs[0].unsqueeze(0)
        logprob = distributed.from_parallel_logits_to_logprobs(
            logits, problem.target.unsqueeze(0), inference_only=not mode.trains, ignore_last=False
        ).squeeze(0)
        with torch.set_grad_enabled(mode is Mode.BOTH):
            return logprob, distributed.calculate_distributed_entropy(logits)

    return Implementation(name, "entropy is one mean; gathers the vocabulary", call)


def _megatron(name: str) -> Implementation:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def call(inputs, problem, mode):
        return -vocab_parallel_cross_entropy(inputs[0], problem.target), None

    return Implementation(
        name, "log-prob only; writes into fp32 logits", call, gives_entropy=False, mutates=True
    )


def _megatron_fused(name: str) -> Implementation:
    # What is compiled is decided at import, where the stand-ins for CUDA leave the compiler out.
    import megatron.core.jit
    from megatron.core.fusions import fused_cross_entropy

    importlib.reload(megatron.core.jit)
    fused = importlib.reload(fused_cross_entropy).fused_vocab_parallel_cross_entropy

    def call(inputs, problem, mode):
        return -fused(inputs[0], problem.target), None

    return Implementation(
        name, "log-prob only; bf16 gradient; may write into fp32 logits", call,
        gives_entropy=False, mutates=True, compiled=True,
    )  # fmt: skip


def _verl(name: str) -> Implementation:
    module = peers.load_verl()

    def call(inputs, problem, mode):
        (logits,) = inputs
        # The log-prob writes into its logits, and the backward of the entropy needs them.
        kept = logits.clone() if mode is Mode.BOTH else logits
        with torch.set_grad_enabled(mode is Mode.BOTH):
            entropy = module.vocab_parallel_entropy(logits)
        return module.vocab_parallel_log_probs_from_logits(kept, problem.target), entropy

    return Implementation(name, "the two operators alone; writes into fp32 logits", call, mutates=True)


def _verl_as_used(name: str) -> Implementation:
    module = peers.load_verl()

    def call(inputs, problem, mode):
        (logits,) = inputs
        logits.div_(torch.ones((problem.tokens, 1)))  # the temperature of each token
        kept = logits.clone()
        with torch.set_grad_enabled(mode is Mode.BOTH):
            entropy = module.vocab_parallel_entropy(logits)
        return module.vocab_parallel_log_probs_from_logits(kept, problem.target), entropy

    return Implementation(name, "with its temperature and its copy of the logits", call, mutates=True)


def _trl(name: str, ranks: int) -> Implementation:
    _refuse_split(ranks)
    module = peers.load_trl()

    def call(inputs, problem, mode):
        return module.selective_log_softmax_and_entropy(
            inputs[0], problem.target, entropy_requires_grad=mode is Mode.BOTH
        )

    return Implementation(name, "torch functions (its Triton kernels need a GPU)", call)


def _fused(name: str) -> Implementation:
    def call(inputs, problem, mode):
        hidden, weight = inputs
        return fused_logprob_entropy(
            hidden,
            weight,
            problem.target,
            problem.split_group,
            temperature=1.0,
            vocab_size=problem.vocab_size,
            entropy_requires_grad=mode is Mode.BOTH,
        )

    return Implementation(name, "chunks of logits, computed again in the backward", call, compiled=True)


def _after_linear(name: str, implementation: Implementation) -> Implementation:
    """The logits are its own then, so there is no need to protect them."""

    def call(inputs, problem, mode):
        hidden, weight = inputs
        return implementation.call((torch.nn.functional.linear(hidden, weight),), problem, mode)

    return Implementation(name, implementation.note, call, compiled=implementation.compiled)


def _trl_chunked(name: str, ranks: int) -> Implementation:
    _refuse_split(ranks)
    module = peers.load_trl_chunked()

    def call(inputs, problem, mode):
        hidden, weight = inputs
        logprob, entropy, *_ = module.ChunkedLogProbFunction.apply(
            hidden, weight, None, problem.target, 1.0, 8192, None, 1.0, ("entropy",)
        )
        return logprob, entropy

    return Implementation(name, "torch tiles of 8192 columns (its Triton kernel needs a GPU)", call)


def _refuse_split(ranks: int) -> None:
    if ranks > 1:
        raise peers.Absent("has no tensor parallelism")
