"""Log-probability, entropy and gradient against the dense float64 reference, on 1, 2 and 4 real ranks."""

import math
from dataclasses import replace

import pytest
import torch
from support.vocabulary import Case, dense, evaluate, join

from tepo_nemo.parallel import vocab, vocab_shard

N, V = 8, 128
FIRST_AND_LAST = torch.tensor([0, 31, 32, 63, 64, 95, 96, 127])  # of each of 4 shards, and so of each of 2


def normal(*shape, scale=1.0, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def with_columns(logits, columns, value):
    return logits.index_fill(-1, torch.as_tensor(columns), value)


def one_hot_like():
    return torch.zeros(N, V).index_put((torch.arange(N), FIRST_AND_LAST), torch.tensor(50.0))


def some_forbidden():
    forbidden = torch.rand(N, V, generator=torch.Generator().manual_seed(7)) < 0.5
    forbidden[torch.arange(N), FIRST_AND_LAST] = False
    return normal(N, V).masked_fill(forbidden, -torch.inf)


def one_shard_above(shard):
    return with_columns(normal(N, V) - 1e4, range(32 * shard, 32 * shard + 32), 1e4)


FIRST_SHARD, THIRD_SHARD = torch.arange(8) * 4, 64 + torch.arange(8) * 4
CASES = {
    "normal": Case(normal(N, V), FIRST_AND_LAST, V),
    "scale 30": Case(normal(N, V, scale=30.0), FIRST_AND_LAST, V),
    "one-hot-like, target on the peak": Case(one_hot_like(), FIRST_AND_LAST, V),
    "one-hot-like, target off the peak": Case(one_hot_like(), FIRST_AND_LAST.flip(0), V),
    "uniform": Case(torch.zeros(N, V), FIRST_AND_LAST, V),
    "all -1e4": Case(torch.full((N, V), -1e4), FIRST_AND_LAST, V),
    "all +1e4": Case(torch.full((N, V), 1e4), FIRST_AND_LAST, V),
    "around -1e4": Case(normal(N, V) - 1e4, FIRST_AND_LAST, V),
    "around +1e4": Case(normal(N, V) + 1e4, FIRST_AND_LAST, V),
    "first shard far above": Case(one_shard_above(0), FIRST_AND_LAST, V),
    "last shard far above": Case(one_shard_above(3), FIRST_AND_LAST, V),
    "-inf columns": Case(some_forbidden(), FIRST_AND_LAST, V),
    "whole first shard -inf": Case(with_columns(normal(N, V), range(32), -torch.inf), THIRD_SHARD, V),
    "whole last shards -inf": Case(with_columns(normal(N, V), range(64, 128), -torch.inf), FIRST_SHARD, V),
    "all but the target -inf": Case(
        torch.full((N, V), -torch.inf).index_put((torch.arange(N), FIRST_AND_LAST), torch.tensor(3.0)),
        FIRST_AND_LAST, V,
    ),
    "odd shard width": Case(normal(N, 4 * 251, scale=3.0), torch.arange(N) * 143, 4 * 251),
    "padded to 128": Case(with_columns(normal(N, V), range(100, 128), 0.0), torch.arange(N) * 14, 100),
    "last shard padding": Case(with_columns(normal(N, V), range(96, 128), 50.0), torch.arange(N) * 13, 96),
    "padding of NaN": Case(with_columns(normal(N, V), range(60, 128), math.nan), torch.arange(N) * 8, 60),
    "padding of +inf": Case(with_columns(normal(N, V), range(127, 128), math.inf), torch.arange(N) * 18, 127),
    "temperature 0.6": Case(normal(N, V, scale=3.0), FIRST_AND_LAST, V, temperature=0.6),  # faults 17
    "temperature 1.7": Case(some_forbidden(), FIRST_AND_LAST, V, temperature=1.7),
    "one token": Case(normal(1, V), torch.tensor([77]), V),
    "tokens of a batch": Case(normal(2, 3, V), torch.tensor([[0, 40, 127], [96, 95, 1]]), V),
}  # fmt: skip
WEIGHTS = {"logprob": (True, False), "entropy": (False, True), "both": (True, True)}


def weighted(case, which):
    """The case with an upstream gradient of both signs for the log-probability, the entropy or both."""
    weights = zip(("logprob_weight", "entropy_weight"), WEIGHTS[which], strict=True)
    names = [name for name, wanted in weights if wanted]
    return replace(case, **{name: normal(*case.target.shape, seed=len(name)) for name in names})


def assert_close(actual, case, *, value=2e-6, gradient=2e-6):
    """Absolute tolerances, in nats and in nats a unit of logit; upstream gradients are of order 1."""
    expected = dense(case)
    torch.testing.assert_close(actual.logprob.double(), expected.logprob, rtol=1e-6, atol=value)
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=1e-6, atol=value)
    torch.testing.assert_close(actual.gradient.double(), expected.gradient, rtol=gradient, atol=gradient)
    return expected


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("which", WEIGHTS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(worlds, name, which, size):  # faults 11, 12, 15
    case = weighted(CASES[name], which)
    actual = join(worlds(size).run(evaluate, case))
    assert actual.logprob.dtype == actual.entropy.dtype == actual.gradient.dtype == torch.float32
    expected = assert_close(actual, case)
    assert expected.gradient.isfinite().all()
    nothing = (case.logits == -torch.inf) | (torch.arange(case.logits.shape[-1]) >= case.vocab_size)
    assert (actual.gradient[nothing] == 0).all()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "name", ["normal", "around +1e4", "-inf columns", "padded to 128", "temperature 0.6"]
)
def test_float64_is_computed_in_float64(worlds, name, size):
    case = weighted(CASES[name], "both")
    case = replace(case, logits=case.logits.double() + normal(*case.logits.shape, seed=3).double() * 1e-9)
    actual, expected = join(worlds(size).run(evaluate, case)), dense(case)
    assert actual.logprob.dtype == actual.gradient.dtype == torch.float64
    for name in ("logprob", "entropy", "gradient"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_bf16_logits_are_computed_in_fp32(worlds, scale, size):  # faults 20
    """32k columns: log-softmax in bf16 errs by 0.035. The gradient is rounded to bf16 once, at the end."""
    case = Case(normal(4, 32000, scale=scale).bfloat16(), torch.tensor([0, 15999, 16000, 31999]), 32000)
    actual, expected = join(worlds(size).run(evaluate, weighted(case, "both"))), dense(weighted(case, "both"))
    assert actual.logprob.dtype == actual.entropy.dtype == torch.float32
    assert actual.gradient.dtype == torch.bfloat16
    torch.testing.assert_close(actual.logprob.double(), expected.logprob, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(actual.gradient.double(), expected.gradient, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("which", WEIGHTS)
def test_the_split_of_the_vocabulary_does_not_matter(worlds, which):  # faults 12, T1
    for name in ("normal", "scale 30", "padded to 128", "temperature 0.6"):
        case = weighted(CASES[name], which)
        one, *others = (join(worlds(size).run(evaluate, case)) for size in (1, 2, 4))
        for other in others:
            torch.testing.assert_close(other.logprob, one.logprob, rtol=1e-6, atol=2e-6)
            torch.testing.assert_close(other.entropy, one.entropy, rtol=1e-6, atol=2e-6)
            torch.testing.assert_close(other.gradient, one.gradient, rtol=2e-6, atol=2e-6)


def test_no_group_is_one_rank(worlds):
    for name in ("normal", "-inf columns", "padded to 128", "temperature 0.6"):
        case = weighted(CASES[name], "both")
        alone, [grouped] = evaluate(0, 1, case), worlds(1).run(evaluate, case)
        assert all(torch.equal(getattr(alone, field), getattr(grouped, field)) for field in vars(alone))


def in_chunks(rank, world_size, case, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vocab_shard.CHUNK_LOGITS, "cpu", 2 * rows * case.logits.shape[-1] // world_size)
        return evaluate(rank, world_size, case)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, N - 1, N, N + 5])
def test_the_number_of_chunks_does_not_matter(worlds, rows, size):
    case = weighted(replace(CASES["scale 30"], mask=torch.arange(N) != 2), "both")
    assert_close(join(worlds(size).run(in_chunks, case, rows)), case)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("change", ["transposed", "without last position", "columns apart"])
def test_any_layout_of_the_logits(worlds, change, size):
    logits = {
        "transposed": normal(3, 4, V).transpose(0, 1),
        "without last position": normal(4, 4, V)[:, :-1],
        "columns apart": normal(4, 3, 2 * V)[..., ::2],
    }[change]
    target = torch.arange(12).view(3, 4).t() * 11
    case = weighted(Case(logits, target, V - 3, mask=target != 22), "both")
    assert not logits.is_contiguous()
    for rows in (2, 100):
        assert_close(join(worlds(size).run(in_chunks, case, rows)), case)


def gradcheck_function(vocab_size, mask, temperature):
    target = torch.tensor([1, 0, 6, 3])

    def function(logits):
        return vocab.vocab_parallel_logprob_entropy(
            logits,
            target,
            None,
            temperature=temperature,
            vocab_size=vocab_size,
            mask=mask,
            entropy_requires_grad=True,
        )

    return function


@pytest.mark.parametrize("vocab_size", [8, 7])
@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True, True])])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradcheck(vocab_size, mask, temperature):
    logits = normal(4, 8, scale=2.0).double().requires_grad_()
    assert torch.autograd.gradcheck(gradcheck_function(vocab_size, mask, temperature), [logits])


def value_of(logits, target, vocab_size=None, temperature=1.0):
    logits = torch.tensor(logits).unsqueeze(0)
    logprob, entropy = vocab.vocab_parallel_logprob_entropy(
        logits,
        torch.tensor([target]),
        None,
        temperature=temperature,
        vocab_size=vocab_size or logits.shape[-1],
    )
    return logprob.item(), entropy.item()


def test_closed_forms():
    quarter = (math.log(1 / 4), -(math.log(1 / 4) + 3 * math.log(3 / 4)) / 4)
    assert value_of([0.0, math.log(3.0)], 0) == pytest.approx(quarter, abs=2e-7)
    assert value_of([0.0, 0.6 * math.log(3.0)], 0, temperature=0.6) == pytest.approx(
        quarter, abs=2e-7
    )  # faults 17
    assert value_of([0.0] * 128, 5) == pytest.approx((-math.log(128), math.log(128)), abs=1e-6)
    assert value_of([0.0] * 128, 5, vocab_size=100) == pytest.approx(
        (-math.log(100), math.log(100)), abs=1e-6
    )
    p = 1 / (1 + math.e)
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert entropy == pytest.approx(0.582, abs=5e-4)
    assert value_of([1.0, 2.0, -math.inf], 1) == pytest.approx(
        (math.log(1 - p), entropy), abs=2e-7
    )  # faults 11
