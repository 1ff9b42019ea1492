"""The fused output layer against a dense float64 one, and what it costs, on 1, 2 and 4 real ranks."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from support.allocations import Allocations
from torch import Tensor

from tepo_nemo.parallel import output_layer
from tepo_nemo.parallel.output_layer import fused_logprob_entropy
from tepo_nemo.parallel.vocab import vocab_parallel_logprob_entropy

N, H, V = 13, 24, 128
SIZES = pytest.mark.parametrize("size", [1, 2, 4])


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass(frozen=True)
class Head:
    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H], of all ranks together
    target: Tensor  # [N]
    vocab_size: int = V
    temperature: float = 1.0
    logprob_weight: Tensor | None = None  # [N], the loss is the sum of weight * output
    entropy_weight: Tensor | None = None


def head(dtype=torch.float32, tokens=N, uses=("logprob", "entropy"), **options):
    weights = {f"{name}_weight": normal(tokens, seed=len(name)) for name in uses}
    return Head(
        normal(tokens, H).to(dtype),
        normal(V, H, seed=1, scale=0.5).to(dtype),
        torch.arange(tokens) * 7 % options.get("vocab_size", V),
        **(weights | options),
    )


@dataclass(frozen=True)
class Outcome:
    logprob: Tensor
    entropy: Tensor
    hidden_gradient: Tensor
    weight_gradient: Tensor


def loss(case, logprob, entropy):
    terms = [(case.logprob_weight, logprob), (case.entropy_weight, entropy)]
    return sum((weight.to(value.dtype) * value).sum() for weight, value in terms if weight is not None)


def evaluate(rank, world_size, case, block=None):
    """Forward and backward of a rank's share."""
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.chunk(world_size)[rank].clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if block is not None:
            patch.setitem(output_layer.BLOCK_LOGITS, "cpu", block)
        logprob, entropy = fused_logprob_entropy(
            hidden,
            weight,
            case.target,
            dist.group.WORLD,
            temperature=case.temperature,
            vocab_size=case.vocab_size,
            entropy_requires_grad=case.entropy_weight is not None,
        )
        loss(case, logprob, entropy).backward()
    return Outcome(logprob.detach(), entropy.detach(), hidden.grad, weight.grad)


def join(outcomes):
    """The parts of the hidden gradient add up, those of the weight stand below each other."""
    for other in outcomes[1:]:
        assert torch.equal(other.logprob, outcomes[0].logprob)
        assert torch.equal(other.entropy, outcomes[0].entropy)
    return Outcome(
        outcomes[0].logprob,
        outcomes[0].entropy,
        sum(outcome.hidden_gradient.double() for outcome in outcomes),
        torch.cat([outcome.weight_gradient for outcome in outcomes]),
    )


def dense(case):
    """In float64, from the definition."""
    hidden, weight = (each.double().requires_grad_() for each in (case.hidden, case.weight))
    log_p = (hidden @ weight[: case.vocab_size].t() / case.temperature).log_softmax(-1)
    logprob = log_p[torch.arange(len(case.target)), case.target]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss(case, logprob, entropy).backward()
    return Outcome(logprob.detach(), entropy.detach(), hidden.grad, weight.grad)


def assert_close(actual, expected):
    """In nats, and in units of gradients of order 1: fp32 matrix products stand before and after."""
    for name, value in vars(expected).items():
        tolerance = 1e-5 if "gradient" in name else 4e-6
        torch.testing.assert_close(getattr(actual, name).double(), value, rtol=tolerance, atol=tolerance)


@SIZES
@pytest.mark.parametrize("uses", [("logprob",), ("entropy",), ("logprob", "entropy")], ids="-".join)
@pytest.mark.parametrize("block", [1, 5 * V, 2**22], ids=["token by token", "five tokens", "at once"])
def test_values_and_gradients(worlds, block, uses, size):
    case = head(uses=uses)
    assert_close(join(worlds(size).run(evaluate, case, block)), dense(case))


@SIZES
@pytest.mark.parametrize(
    "options",
    [{"vocab_size": 100}, {"vocab_size": 60}, {"temperature": 0.6}, {"tokens": 1}],
    ids=["padded", "ranks of padding alone", "temperature", "one token"],
)
@pytest.mark.parametrize("block", [3 * V, 2**22])
def test_edges(worlds, block, options, size):
    case = head(**options)
    expected = dense(case)
    actual = join(worlds(size).run(evaluate, case, block))
    assert_close(actual, expected)
    assert not actual.weight_gradient[case.vocab_size :].any()


@SIZES
def test_no_tokens(worlds, size):
    """A micro-batch of padding alone takes part in the exchange, and its gradients are 0."""
    actual = join(worlds(size).run(evaluate, head(tokens=0)))
    assert actual.logprob.shape == actual.entropy.shape == (0,)
    assert actual.hidden_gradient.shape == (0, H)
    assert actual.weight_gradient.shape == (V, H) and not actual.weight_gradient.any()


@SIZES
@pytest.mark.parametrize("block", [64 * V, 2**22], ids=["blocks", "at once"])
def test_bf16_is_rounded_once(worlds, block, size):
    """The float64 reference takes the same bf16 logits: what is left is the rounding of slopes and results.
    Added up in bf16 over 2,048 tokens, the weight gradient would be off by several per cent."""
    case = head(torch.bfloat16, tokens=2048)
    actual = join(worlds(size).run(evaluate, case, block))
    logits = (case.hidden @ case.weight.t()).double().requires_grad_()
    log_p = logits.log_softmax(-1)
    logprob, entropy = log_p[torch.arange(2048), case.target], -(log_p.exp() * log_p).sum(-1)
    loss(case, logprob, entropy).backward()
    torch.testing.assert_close(actual.logprob.double(), logprob.detach(), rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(actual.entropy.double(), entropy.detach(), rtol=1e-6, atol=4e-6)
    for found, wanted in (
        (actual.hidden_gradient, logits.grad @ case.weight.double()),
        (actual.weight_gradient, logits.grad.t() @ case.hidden.double()),
    ):
        assert (found.double() - wanted).norm() / wanted.norm() < 2**-8
    assert actual.weight_gradient.dtype == torch.bfloat16


@pytest.mark.parametrize("block", [2 * 8, 2**22])
def test_gradcheck(monkeypatch, block):
    monkeypatch.setitem(output_layer.BLOCK_LOGITS, "cpu", block)
    hidden, weight = normal(4, 5).double().requires_grad_(), normal(8, 5, seed=1).double().requires_grad_()

    def function(hidden, weight):
        return fused_logprob_entropy(
            hidden, weight, torch.tensor([1, 0, 6, 3]), None,
            temperature=0.7, vocab_size=7, entropy_requires_grad=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, [hidden, weight])


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_the_gradient_that_is_asked_for(frozen):
    """A frozen output layer, or a frozen model below it."""
    case = head()
    inputs = {"hidden": case.hidden.clone().requires_grad_(), "weight": case.weight.clone().requires_grad_()}
    inputs[frozen].requires_grad_(False)
    logprob, entropy = fused_logprob_entropy(
        *inputs.values(), case.target, None, temperature=1.0, vocab_size=V, entropy_requires_grad=True
    )
    loss(case, logprob, entropy).backward()
    assert inputs.pop(frozen).grad is None
    [(name, trained)] = inputs.items()
    wanted = getattr(dense(case), f"{name}_gradient")
    torch.testing.assert_close(trained.grad.double(), wanted, rtol=4e-6, atol=4e-6)


def plain(rank, world_size, case):
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight.chunk(world_size)[rank].clone().requires_grad_()
    logprob, entropy = vocab_parallel_logprob_entropy(
        hidden @ weight.t(), case.target, dist.group.WORLD, temperature=case.temperature,
        vocab_size=case.vocab_size, entropy_requires_grad=True, overwrite_logits=True,
    )  # fmt: skip
    loss(case, logprob, entropy).backward()
    return Outcome(logprob.detach(), entropy.detach(), hidden.grad, weight.grad)


@SIZES
def test_the_plain_path_gives_the_same(worlds, size):
    case = head(temperature=0.6, vocab_size=120)
    fused, separate = (join(worlds(size).run(function, case)) for function in (evaluate, plain))
    for name in vars(fused):
        torch.testing.assert_close(getattr(fused, name), getattr(separate, name), rtol=1e-6, atol=2e-6)


# Cost


def allocated(rank, world_size, tokens, block):
    """Sizes of what forward and backward allocate."""
    case, made = head(tokens=tokens), Allocations()
    with made:
        evaluate(rank, world_size, case, block)
    return sorted(made.sizes)


@pytest.mark.parametrize("size", [1, 2])
def test_logits_are_never_there_as_a_whole(worlds, size):
    """Of 512 tokens and 128 columns, blocks of 1,024 logits at a time (and two buffers of the operator)."""
    tokens, block = 512, 1024
    for sizes in worlds(size).run(allocated, tokens, block):
        numbers_a_token = 4 * 4 * tokens * size
        largest = max(block * 4, numbers_a_token, tokens * H * 4, V * H * 4)
        assert sizes[-1] <= largest < tokens * V // size * 4


def flops_of(rank, world_size, tokens, block):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        evaluate(rank, world_size, head(tokens=tokens), block)
    return counter.get_total_flops()


@pytest.mark.parametrize("block", [512, 2**22])
def test_four_matrix_products(worlds, block):
    """Forward one, backward three (logits again, hidden gradient, weight gradient), of 2 N H V each."""
    assert worlds(2).run(flops_of, 32, block) == [4 * 2 * 32 * H * V // 2] * 2


def collectives_of(rank, world_size, block):
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        original = dist.all_gather
        patch.setattr(
            dist,
            "all_gather",
            lambda out, tensor, **rest: calls.append(tensor.nbytes) or original(out, tensor, **rest),
        )  # noqa: E501
        for name in ("all_reduce", "broadcast", "reduce_scatter", "all_gather_into_tensor"):
            patch.setattr(dist, name, lambda *arguments, **rest: calls.append(math.inf))
        evaluate(rank, world_size, head(), block)
    return calls


@pytest.mark.parametrize("block", [1, 2**22])
def test_one_exchange_however_many_blocks(worlds, block):
    """16 bytes a token forward, nothing backward."""
    assert worlds(2).run(collectives_of, block) == [[16 * N]] * 2
