"""What the operator promises beside its numbers: masks, forbidden tokens, gradients, determinism."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.vocabulary import Case, dense, evaluate, join

from tepo_nemo.parallel.vocab import vocab_parallel_logprob_entropy

N, V = 12, 128
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case_of(logits, target=None, **options):
    target = torch.arange(N) * 10 if target is None else target
    weights = {
        "logprob_weight": normal(*target.shape, seed=1),
        "entropy_weight": normal(*target.shape, seed=2),
    }
    return Case(logits, target, V, **(weights | options))


# Masks


@SIZES
@pytest.mark.parametrize("excluded", [[0], [N - 1], [3, 4], list(range(N))])
def test_masked_tokens_are_zero_whatever_they_hold(worlds, excluded, size):
    """Targets out of range on either side, NaN and infinite logits (ignore index)."""
    logits, target = normal(N, V), torch.arange(N) * 10
    for place, index in enumerate(excluded):
        target[index] = [-100, 10**6, -1, V][place % 4]
        logits[index] = [math.nan, math.inf, 0.0][place % 3]
    mask = torch.ones(N, dtype=torch.bool).index_fill(0, torch.tensor(excluded), False)
    case = case_of(logits, target, mask=mask)
    actual, expected = join(worlds(size).run(evaluate, case)), dense(case)
    assert not (actual.logprob[~mask].any() or actual.entropy[~mask].any() or actual.gradient[~mask].any())
    torch.testing.assert_close(actual.logprob.double(), expected.logprob, rtol=0, atol=2e-6)
    torch.testing.assert_close(actual.entropy.double(), expected.entropy, rtol=0, atol=2e-6)
    torch.testing.assert_close(actual.gradient.double(), expected.gradient, rtol=0, atol=2e-6)


@SIZES
def test_target_outside_the_vocabulary_shows_in_the_loss(worlds, size):
    target = torch.arange(N) * 10
    target[[0, 5, N - 1]] = torch.tensor([-1, V, 100])
    case = replace(case_of(normal(N, V), target), vocab_size=100)  # 100 and on are padding
    logprob = join(worlds(size).run(evaluate, case)).logprob
    assert (logprob == -torch.inf).tolist() == ((target < 0) | (target >= 100)).tolist()


# Forbidden tokens


@SIZES
def test_forbidden_target_is_finite_and_gets_no_gradient(worlds, size):
    """log p(target) = constant - log sum of the others: each other logit has slope -p."""
    logits = normal(N, V)
    target = torch.arange(N) * 10
    logits[torch.arange(N), target] = -torch.inf
    case = case_of(logits, target, entropy_weight=None)
    actual = join(worlds(size).run(evaluate, case))
    assert (actual.logprob < -1e29).all() and actual.logprob.isfinite().all()
    slope = -logits.double().softmax(-1) * case.logprob_weight[:, None]
    assert not actual.gradient[torch.arange(N), target].any()
    torch.testing.assert_close(actual.gradient.double(), slope, rtol=0, atol=2e-6)


@SIZES
def test_token_without_any_allowed_target_is_finite(worlds, size):
    logits = normal(N, V)
    logits[[0, 7]] = -torch.inf
    case = case_of(logits)
    actual = join(worlds(size).run(evaluate, case))
    assert actual.logprob.isfinite().all() and actual.entropy.isfinite().all()
    assert actual.gradient.isfinite().all() and not actual.gradient[[0, 7]].any()
    others = [index for index in range(N) if index not in (0, 7)]
    kept = Case(logits[others], case.target[others], V, 1.0, None, *(
        weight[others] for weight in (case.logprob_weight, case.entropy_weight)
    ))  # fmt: skip
    torch.testing.assert_close(actual.gradient[others].double(), dense(kept).gradient, rtol=0, atol=2e-6)


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smallest_finite_logit_means_the_same_as_minus_infinity(worlds, dtype, size):
    """Divided by a temperature below 1 it overflows."""
    forbidden = torch.rand(N, V, generator=torch.Generator().manual_seed(3)) < 0.5
    forbidden[torch.arange(N), torch.arange(N) * 10] = False
    logits = normal(N, V).to(dtype)
    smallest, infinite = (
        join(worlds(size).run(evaluate, case_of(logits.masked_fill(forbidden, value), temperature=0.6)))
        for value in (torch.finfo(dtype).min, -torch.inf)
    )
    assert all(torch.equal(getattr(smallest, name), getattr(infinite, name)) for name in vars(smallest))
    assert smallest.gradient.isfinite().all()


def test_large_upstream_gradient_stays_finite_beside_forbidden_tokens(worlds):
    logits = normal(N, V).index_fill(-1, torch.arange(64, 128), -torch.inf)
    case = case_of(logits, torch.arange(N), entropy_weight=torch.full((N,), 1e12))
    assert join(worlds(2).run(evaluate, case)).gradient.isfinite().all()


def test_nan_logits_are_not_hidden(worlds):
    logits = normal(N, V).index_put((torch.tensor([4]), torch.tensor([100])), torch.tensor(math.nan))
    actual = join(worlds(2).run(evaluate, case_of(logits)))
    bad = torch.arange(N) == 4
    assert torch.equal(actual.logprob.isnan(), bad) and torch.equal(actual.entropy.isnan(), bad)
    assert torch.equal(actual.gradient.isnan().any(-1), bad)


# Gradients


@pytest.mark.parametrize("requires", [False, True])
def test_entropy_is_differentiable_only_on_request(requires):
    logits = normal(N, V).requires_grad_()
    logprob, entropy = vocab_parallel_logprob_entropy(
        logits, torch.arange(N), None, temperature=1.0, vocab_size=V, entropy_requires_grad=requires
    )
    assert logprob.requires_grad and entropy.requires_grad == requires


def test_no_graph_without_gradient():
    with torch.no_grad():
        outputs = vocab_parallel_logprob_entropy(
            normal(N, V).requires_grad_(),
            torch.arange(N),
            None,
            temperature=1.0,
            vocab_size=V,
            entropy_requires_grad=True,
        )
    assert not any(output.requires_grad for output in outputs)


@SIZES
@pytest.mark.parametrize("used", ["logprob_weight", "entropy_weight"])
def test_output_that_the_loss_does_not_use(worlds, used, size):
    """Its gradient arrives as None; the same as a weight of zero."""
    unused = {"logprob_weight", "entropy_weight"} - {used}
    case = case_of(normal(N, V))
    zero = replace(case, **{name: torch.zeros(N) for name in unused})
    none = replace(case, **{name: None for name in unused})
    with_zero, with_none = (join(worlds(size).run(evaluate, each)).gradient for each in (zero, none))
    torch.testing.assert_close(with_none, with_zero, rtol=1e-6, atol=1e-7)


def use_twice(rank, world_size, logits):
    shard = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    before = shard.detach().clone()
    logprob, entropy = vocab_parallel_logprob_entropy(
        shard, torch.arange(N), dist.group.WORLD, temperature=0.6, vocab_size=V, entropy_requires_grad=True
    )
    second = shard.double().square().sum()
    unchanged = torch.equal(shard, before)
    [alone] = torch.autograd.grad([logprob.sum() + entropy.sum()], [shard], retain_graph=True)
    unchanged &= torch.equal(shard, before)
    [both] = torch.autograd.grad([logprob.sum() + entropy.sum() + second], [shard])
    unchanged &= torch.equal(shard, before)
    return unchanged, torch.equal(both, alone + 2 * before)


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_changed(worlds, dtype, size):  # faults 13, 14
    """A consumer after the call and a second backward see what the caller had."""
    assert worlds(size).run(use_twice, normal(N, V).to(dtype)) == [(True, True)] * size


def overwrite(rank, world_size, logits, options):
    """Gradient of separate and of overwritten logits, and whether a second backward is refused."""
    shard = logits.chunk(world_size, -1)[rank].contiguous()
    found = []
    for overwrite_logits in (False, True):
        own = shard.clone().requires_grad_().mul(1)  # not a leaf, as logits are none
        logprob, entropy = vocab_parallel_logprob_entropy(
            own, torch.arange(N) * 10, dist.group.WORLD, temperature=0.6, entropy_requires_grad=True,
            overwrite_logits=overwrite_logits, **options,
        )  # fmt: skip
        loss = (logprob * normal(N, seed=1) + entropy * normal(N, seed=2)).sum()
        [gradient] = torch.autograd.grad([loss], [own], retain_graph=True)
        found.append(gradient)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad([loss], [own])
    return torch.equal(*found), gradient.data_ptr() == own.data_ptr()


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"mask": torch.arange(N) != 3}], ids=["all", "masked"])
@pytest.mark.parametrize("vocab_size", [V, 120])
def test_overwriting_gives_the_same_gradient_once(worlds, vocab_size, options, dtype, size):
    """In the logits' own memory; they are gone then, and a second backward says so."""
    options = {"vocab_size": vocab_size} | options
    assert worlds(size).run(overwrite, normal(N, V).to(dtype), options) == [(True, True)] * size


# Sizes at the edge


@SIZES
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens(worlds, shape, size):
    case = case_of(
        torch.zeros(*shape, V), torch.zeros(shape, dtype=torch.int64), mask=torch.ones(shape).bool()
    )
    actual = join(worlds(size).run(evaluate, case))
    assert actual.logprob.shape == actual.entropy.shape == shape and actual.gradient.shape == (*shape, V)


def test_a_single_token_without_batch_dimension():
    logits = normal(V)
    logprob, entropy = vocab_parallel_logprob_entropy(
        logits, torch.tensor(5), None, temperature=1.0, vocab_size=V
    )
    log_p = logits.double().log_softmax(-1)
    assert logprob.item() == pytest.approx(log_p[5].item(), abs=2e-6)
    assert entropy.item() == pytest.approx(-(log_p.exp() * log_p).sum().item(), abs=2e-6)


# Determinism


@SIZES
def test_two_runs_give_the_same_bits(worlds, size):
    case = case_of(normal(N, V) * 5, temperature=0.6)
    first, second = (join(worlds(size).run(evaluate, case)) for _ in range(2))
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in vars(first))


def in_parts(rank, world_size, logits, rows):
    shard = logits.chunk(world_size, -1)[rank]
    options = dict(temperature=0.6, vocab_size=V)
    with torch.no_grad():
        parts = [
            vocab_parallel_logprob_entropy(part, target, dist.group.WORLD, **options)
            for part, target in zip(shard.split(rows), (torch.arange(N) * 10).split(rows), strict=True)
        ]
    return torch.cat([logprob for logprob, _ in parts]), torch.cat([entropy for _, entropy in parts])


@SIZES
def test_a_token_does_not_depend_on_its_micro_batch(worlds, size):  # faults 20, 21, T1, T8
    """Old and new entropy of unchanged weights are the same bits: their difference is 0 and not noise."""
    logits = normal(N, V) * 3
    whole = join(worlds(size).run(evaluate, case_of(logits, temperature=0.6)))
    for rows in (1, 4, 5):
        for logprob, entropy in worlds(size).run(in_parts, logits, rows):
            assert torch.equal(logprob, whole.logprob) and torch.equal(entropy, whole.entropy)
