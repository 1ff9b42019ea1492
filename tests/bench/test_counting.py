"""Counters against hand counts."""

import pytest
import torch
import torch.distributed as dist

from tepo_nemo.bench.counting import CollectiveCounter, held_by_nodes, saved_for_backward


def count_each_collective(rank, world_size):
    ten = torch.ones(10)
    calls = {
        "all_reduce": lambda: dist.all_reduce(ten),
        "all_gather": lambda: dist.all_gather([torch.empty(10) for _ in range(2)], ten),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(20), ten),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(5), ten),
        "broadcast": lambda: dist.broadcast(ten, 0),
        "two all_reduces": lambda: (dist.all_reduce(ten), dist.all_reduce(ten.to(torch.bfloat16))),
        "barrier": dist.barrier,
        "none": lambda: ten * 2,
    }
    counts = {}
    for name, call in calls.items():
        with CollectiveCounter() as counter:
            call()
        counts[name] = (counter.calls, counter.bytes)
    return counts


def test_collectives_and_what_a_rank_puts_into_them(worlds):
    right = {
        "all_reduce": (1, 40), "all_gather": (1, 40), "all_gather_into_tensor": (1, 40),
        "reduce_scatter_tensor": (1, 40), "broadcast": (1, 40), "two all_reduces": (2, 60),
        "barrier": (0, 0), "none": (0, 0),
    }  # fmt: skip
    assert worlds(2).run(count_each_collective) == [right, right]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def count_in_backward(rank, world_size):
    value = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with CollectiveCounter() as forward:
        total = _SumOverRanks.apply(value).sum()
    with CollectiveCounter() as backward:
        total.backward()
    return (forward.calls, forward.bytes), (backward.calls, backward.bytes), value.grad.tolist()


def test_collectives_of_a_backward_are_seen(worlds):
    assert worlds(2).run(count_in_backward) == [((0, 0), (1, 24), [2.0, 2.0, 2.0])] * 2


class _KeepsAnAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.hidden = torch.ones(7)
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_saved_tensors_are_counted_once_each_and_without_the_inputs():
    x = torch.ones(100, requires_grad=True)
    with saved_for_backward() as saved:
        y = x.exp()  # keeps its result, 400 bytes
        z = y * x  # keeps both factors: the same result again, and the input
        z.view(10, 10).sigmoid().sum()  # keeps its result, another 400 bytes
    assert saved.take_bytes([x]) == 800


def test_nothing_is_saved_without_gradient():
    with saved_for_backward() as saved, torch.no_grad():
        torch.ones(100, requires_grad=True).exp()
    assert saved.take_bytes([]) == 0


@pytest.mark.parametrize("after", [lambda y: y, lambda y: (y + 1).sum()])
def test_tensors_that_hide_in_attributes_are_found(after):
    x = torch.ones(100, requires_grad=True)
    with saved_for_backward() as saved:
        result = after(_KeepsAnAttribute.apply(x))
    saved.add(held_by_nodes([result]))
    assert saved.take_bytes([x]) == 28
