"""Peak memory against hand counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tepo_nemo.bench.memory import LiveStorage, high_water_bytes, in_child, prepare_high_water

MB = 2**20


def test_a_tensor_counts_while_it_lives():
    x = torch.ones(100)
    with LiveStorage() as live:
        a = x + 1  # 400
        b = a + 1  # 800
        del a
        assert live.live == 400
        c = b.double()  # 400 + 800
        del b, c
        assert (live.live, live.peak) == (0, 1200)


def test_views_and_writes_into_what_exists_cost_nothing():
    x = torch.ones(10, 10)
    with LiveStorage() as live:
        y = x.view(-1)[3:].unsqueeze(0)
        y.add_(1).exp_()
        torch.add(x, 1, out=x)
        x[2:4] = 0
        assert live.peak == 0
        z = x + x  # the first storage of its own
        assert (z.view(5, 20).mul_(2).t().nbytes, live.peak) == (400, 400)


def test_a_view_keeps_the_whole_storage():
    with LiveStorage() as live:
        y = (torch.ones(1000))[:1]
        assert live.live == 4000
        del y
        assert live.live == 0


def test_the_peak_of_a_backward():
    x = torch.ones(100, requires_grad=True)
    with LiveStorage() as live:
        y = (x * 2).exp()  # 2 x and its exponential: 800, then 400 are kept
        assert (live.peak, live.live) == (800, 400)
        torch.autograd.grad(y, x, torch.ones(100))  # 400 more for ones, its product with y, that times 2
        assert live.peak == 1600


# --- forks ---------------------------------------------------------------------------------------
# Operators of a process that forks must have one thread: each of these tests has a process of its own.


def in_process_of_one_thread(function):
    """The result of `function`, which is at the top of this module, in a new process."""
    file = Path(__file__)
    code = f"import json, {file.stem} as tests; print(json.dumps(tests.{function.__name__}()))"
    paths = os.pathsep.join(filter(None, [str(file.parent), *sys.path]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    return json.loads(output)


SIZES = [(8,), (64,), (16, 48, 4)]


def high_water_of(*sizes):
    prepare_high_water()

    def allocate():
        for size in sizes:
            torch.ones(size * MB // 4)  # gone at once

    allocate()
    return high_water_bytes(allocate)


def high_waters():
    return [in_child(lambda: high_water_of(*sizes)) for sizes in SIZES]  # noqa: B023 - called at once


def test_the_high_water_of_a_process_is_that_of_its_largest_moment():
    for peak, sizes in zip(in_process_of_one_thread(high_waters), SIZES, strict=True):
        assert abs(peak - max(sizes) * MB) < MB / 2  # the kernel counts pages in batches


def children():
    state = []
    answer = in_child(lambda: state.append(1) or {"answer": 42})
    try:
        in_child(lambda: 1 / 0)
    except RuntimeError as error:
        return [answer, state, str(error)]


def test_a_child_leaves_its_parent_alone_and_its_failure_is_told():
    answer, state, error = in_process_of_one_thread(children)
    assert (answer, state) == ({"answer": 42}, [])
    assert "exit code 1" in error


def test_a_process_with_parallel_operators_does_not_fork():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(AssertionError, match="2 threads forks"):
            in_child(lambda: None)
    finally:
        torch.set_num_threads(before)
