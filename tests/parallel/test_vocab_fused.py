"""The operator through torch.compile: the values of the eager one, whatever the number of tokens."""

import warnings

import pytest
import torch
from support.vocabulary import Case, dense, evaluate

from tepo_nemo.parallel import vocab_shard
from tepo_nemo.parallel.vocab import vocab_parallel_logprob_entropy
from tepo_nemo.parallel.vocab_shard import Columns, is_fused

pytestmark = pytest.mark.timeout(300)  # the compiler takes seconds a function

V = 1003
CPU = torch.device("cpu")


@pytest.fixture
def fused(monkeypatch):
    """Every width is compiled, from scratch."""
    monkeypatch.setattr(vocab_shard, "FUSED_WIDTH", 64)
    vocab_shard._compiled.cache_clear()
    torch.compiler.reset()
    assert is_fused(Columns(0, V), CPU), "this machine has a C++ compiler"
    yield
    vocab_shard._compiled.cache_clear()
    torch.compiler.reset()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def peaked(tokens):
    """One likely token and many unlikely ones, which a sum one after the other would lose beside it."""
    return torch.zeros(tokens, V).index_put(
        (torch.arange(tokens), torch.arange(tokens) * 30), torch.tensor(9.0)
    )


def case_of(logits, uses=("logprob", "entropy"), **options):
    tokens = len(logits)
    weights = {f"{name}_weight": normal(tokens, seed=len(name)) for name in uses}
    return Case(logits, torch.arange(tokens) * 30, options.pop("vocab_size", V), **weights, **options)


def check(case, value=2e-6, gradient=2e-6):
    actual, expected = evaluate(0, 1, case), dense(case)
    torch.testing.assert_close(actual.logprob.double(), expected.logprob, rtol=1e-6, atol=value)
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=1e-6, atol=value)
    torch.testing.assert_close(actual.gradient.double(), expected.gradient, rtol=gradient, atol=2e-6)


def test_values_and_gradients(fused):
    forbidden = normal(20, V).masked_fill(torch.arange(V) % 7 == 1, -torch.inf)
    forbidden[torch.arange(20), torch.arange(20) * 30] = 0.0
    for logits in (
        normal(20, V),
        normal(20, V) * 30,
        normal(20, V) + 1e4,
        normal(20, V) - 1e4,
        peaked(20),
        forbidden,
    ):
        check(case_of(logits))
    for options in ({"temperature": 0.6}, {"vocab_size": 800}):
        check(case_of(normal(20, V), **options))


def test_each_gradient_alone_and_masked_tokens(fused):
    check(case_of(normal(20, V), uses=("logprob",)))
    check(case_of(normal(20, V), uses=("entropy",)))
    check(case_of(normal(20, V).index_fill(0, torch.tensor([3]), torch.nan), mask=torch.arange(20) != 3))


def test_bf16(fused):
    check(case_of(normal(20, V).bfloat16()), gradient=2**-8)


def test_a_token_does_not_depend_on_its_micro_batch(fused):
    """One kernel serves every number of tokens; its results are the same bits."""
    logits, target = normal(33, V) * 3, torch.arange(33) * 30

    def run(rows):
        return vocab_parallel_logprob_entropy(logits[rows], target[rows], None, temperature=0.7, vocab_size=V)

    whole = run(slice(0, 33))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (slice(0, 2), slice(2, 9), slice(9, 33), slice(5, 30)):
        assert all(torch.equal(part, of_all[rows]) for part, of_all in zip(run(rows), whole, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    one = run(slice(7, 8))
    assert all(torch.equal(part, of_all[7:8]) for part, of_all in zip(one, whole, strict=True))


def test_overwritten_logits(fused):
    logits, target = normal(20, V), torch.arange(20) * 30
    gradients = []
    for overwrite in (False, True):
        own = logits.clone().requires_grad_().mul(1)
        logprob, _ = vocab_parallel_logprob_entropy(
            own, target, None, temperature=1.0, vocab_size=V, overwrite_logits=overwrite
        )
        gradients += torch.autograd.grad(logprob.sum(), [own], retain_graph=True)
    assert torch.equal(*gradients) and gradients[1].data_ptr() == own.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(logprob.sum(), [own])


def test_narrow_vocabularies_are_not_compiled():
    assert not is_fused(Columns(0, vocab_shard.FUSED_WIDTH - 1), CPU)


def test_without_a_compiler_it_warns_and_runs_eagerly(monkeypatch):
    def broken(function):
        def call(*arguments):
            raise RuntimeError("no compiler: g++ is missing\nand more")

        return call

    monkeypatch.setattr(vocab_shard, "_compiled", broken)
    vocab_shard._compiler_works.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match="without torch.compile, more slowly: no compiler: g\\+\\+ is missing$"
        ):
            assert not is_fused(Columns(0, 2**17), CPU)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once is enough
            assert not is_fused(Columns(0, 2**17), CPU)
    finally:
        vocab_shard._compiler_works.cache_clear()


def test_a_switched_off_compiler_is_not_asked(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    vocab_shard._compiler_works.cache_clear()
    assert not is_fused(Columns(0, 2**17), CPU)
    vocab_shard._compiler_works.cache_clear()
