"""Every stage holds what the last one computed (faults 23)."""

import pytest
import torch
import torch.distributed as dist

from tepo_nemo.parallel.pipeline import broadcast_from_last_stage, broadcast_object_from_last_stage


def to_all(rank, world_size, value, last_rank):
    own = value.clone() if rank == last_rank else None
    received = broadcast_from_last_stage(own, value.shape, value.dtype, "cpu", dist.group.WORLD, last_rank)
    assert own is None or torch.equal(own, value)
    return received


@pytest.mark.parametrize("size, last_rank", [(1, 0), (2, 1), (4, 3), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_stage_gets_the_tensor(worlds, size, last_rank, dtype):
    value = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 5.0]]).to(dtype)
    for received in worlds(size).run(to_all, value, last_rank):
        assert torch.equal(received, value) and received.dtype == dtype


def awkward(rank, world_size):
    last = world_size - 1
    group = dist.group.WORLD
    base = torch.arange(6.0, requires_grad=True).view(2, 3)
    transposed = broadcast_from_last_stage(
        base.t() if rank == last else None, (3, 2), base.dtype, "cpu", group, last
    )
    empty = broadcast_from_last_stage(
        torch.empty(0, 4) if rank == last else None, (0, 4), base.dtype, "cpu", group, last
    )
    scalar = broadcast_from_last_stage(
        torch.tensor(7.5) if rank == last else None, (), base.dtype, "cpu", group, last
    )
    # What a stage that is not the last one hands in is not looked at.
    junk = torch.full((9,), -1.0) if rank != last else torch.tensor([4.0])
    looked_past = broadcast_from_last_stage(junk, (1,), base.dtype, "cpu", group, last)
    return transposed, tuple(empty.shape), scalar.item(), looked_past.item(), transposed.requires_grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_layout_emptiness_and_gradient_do_not_matter(worlds, size):
    for transposed, empty, scalar, looked_past, requires_grad in worlds(size).run(awkward):
        assert transposed.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert (empty, scalar, looked_past, requires_grad) == ((0, 4), 7.5, 4.0, False)


def two_pipelines(rank, world_size):
    """Pipelines {0, 2} and {1, 3}: the source is a global rank, not a rank of the group."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    last = 2 + rank % 2
    own = torch.tensor([float(rank)]) if rank == last else None
    tensor = broadcast_from_last_stage(own, (1,), torch.float32, "cpu", groups[rank % 2], last)
    obj = broadcast_object_from_last_stage({"loss": rank} if rank == last else None, groups[rank % 2], last)
    dist.barrier()
    dist.destroy_process_group(groups[rank % 2])
    return tensor.item(), obj


def test_pipelines_beside_each_other_do_not_mix(worlds):
    even, odd = (2.0, {"loss": 2}), (3.0, {"loss": 3})
    assert worlds(4).run(two_pipelines) == [even, odd, even, odd]


def object_to_all(rank, world_size):
    own = {"loss": 0.5, "names": ["a"]} if rank == world_size - 1 else {"loss": -1.0}
    return broadcast_object_from_last_stage(own, dist.group.WORLD, world_size - 1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_stage_gets_the_object(worlds, size):
    assert worlds(size).run(object_to_all) == [{"loss": 0.5, "names": ["a"]}] * size


def test_one_stage_without_a_group_returns_what_it_has():
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    received = broadcast_from_last_stage(value, (2,), torch.float32, "cpu", None, 0)
    assert torch.equal(received, value) and not received.requires_grad
    metrics = {"loss": 1.0}
    assert broadcast_object_from_last_stage(metrics, None, 0) == metrics


@pytest.mark.parametrize(
    "value, shape", [(torch.zeros(2), (3,)), (torch.zeros(3, dtype=torch.float64), (3,)), (None, (3,))]
)
def test_the_last_stage_must_keep_to_the_announced_tensor(value, shape):
    with pytest.raises(AssertionError):
        broadcast_from_last_stage(value, shape, torch.float32, "cpu", None, 0)
