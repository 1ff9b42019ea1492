"""The worlds that other tests rely on: right results, failures and hangs that name their rank, clean-up."""

import os
import signal
import sys
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tepo_nemo.errors import UserError


@dataclass(frozen=True)
class Reply:
    rank: int
    total: float
    pid: int


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def reduce_ranks(rank, world_size, scale):
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    return Reply(rank, value.item() * scale, os.getpid())


def fail_in(rank, world_size, failing, kind):
    if rank == failing:
        if kind == "user":
            raise UserError("max_steps is 0")
        if kind == "unpicklable":
            raise Unpicklable("first", "second")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_in(rank, world_size, hanging):
    if rank in hanging:
        time.sleep(1000)
    return rank


def settings(rank, world_size):
    return (
        torch.get_num_threads(),
        os.environ["OMP_NUM_THREADS"],
        torch.cuda.is_available(),
        dist.get_backend(),
    )


def fresh_ranks(rank, world_size):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    began_bare = not dist.is_initialized() and "nemo_aligner" in sys.modules
    dist.init_process_group("gloo")
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    return [os.environ[name] for name in names], began_bare, value.item(), os.getpid()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order_and_ranks_are_reused(worlds, size):
    first = worlds(size).run(reduce_ranks, 10.0)
    assert [reply.rank for reply in first] == list(range(size))
    assert [reply.total for reply in first] == [10.0 * sum(range(size))] * size
    assert worlds(size).run(reduce_ranks, 10.0) == first  # the pids are equal too
    assert len({reply.pid for reply in first} | {os.getpid()}) == size + 1


def test_ranks_have_one_thread_and_no_gpu(worlds):
    assert worlds(2).run(settings) == [(1, "1", False, "gloo")] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_exception_reaches_the_test_with_its_rank(worlds, failing):
    with pytest.raises(UserError, match="max_steps is 0") as caught:
        worlds(2).run(fail_in, failing, "user")
    assert f"rank {failing}" in caught.value.__notes__[0] and "fail_in" in caught.value.__notes__[0]
    assert [reply.total for reply in worlds(2).run(reduce_ranks, 1.0)] == [1.0, 1.0]


def test_exception_that_cannot_be_pickled_is_told_in_words(worlds):
    with pytest.raises(RuntimeError, match="rank 1: .*Unpicklable: first second"):
        worlds(2).run(fail_in, 1, "unpicklable")


def test_death_of_a_rank_is_named(worlds):
    with pytest.raises(RuntimeError, match="rank 1 died"):
        worlds(2).run(fail_in, 1, "die")
    assert [reply.total for reply in worlds(2).run(reduce_ranks, 1.0)] == [1.0, 1.0]


def test_rank_that_died_between_two_calls_is_replaced(worlds):
    pids = [reply.pid for reply in worlds(2).run(reduce_ranks, 1.0)]
    os.kill(pids[1], signal.SIGKILL)
    time.sleep(0.2)
    replies = worlds(2).run(reduce_ranks, 1.0)
    assert [reply.total for reply in replies] == [1.0, 1.0]
    assert not {reply.pid for reply in replies} & set(pids)


def test_hang_names_the_ranks_and_kills_them_alone(worlds):
    others = [reply.pid for reply in worlds(4).run(reduce_ranks, 1.0)]
    pids = [reply.pid for reply in worlds(2).run(reduce_ranks, 1.0)]
    with pytest.raises(TimeoutError, match=r"rank\(s\) 1;"):
        worlds(2).run(hang_in, [1], timeout=0.5)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert [reply.pid for reply in worlds(4).run(reduce_ranks, 1.0)] == others


def test_function_inside_another_is_refused(worlds):
    with pytest.raises(TypeError, match="top of its module"):
        worlds(2).run(lambda rank, world_size: rank)


def test_nemo_ranks_are_new_for_every_call(worlds):
    """Process groups are left to the function: the same processes could not make them a second time."""
    seen = set()
    for _ in range(2):
        for rank, (settings, began_bare, total, pid) in enumerate(worlds(2, stack="nemo").run(fresh_ranks)):
            assert settings == [str(rank), str(rank), "2", "127.0.0.1"] and began_bare and total == 1.0
            seen.add(pid)
    assert len(seen) == 4
