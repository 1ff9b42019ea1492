"""Data-parallel sums and rows: hand-made values on real ranks."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from tepo_nemo.parallel.data import gather_ragged_rows, sum_over_ranks


@contextmanager
def counted(name):
    """Counts the calls of a function of torch.distributed."""
    original, calls = getattr(dist, name), []
    setattr(dist, name, lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs))
    try:
        yield calls
    finally:
        setattr(dist, name, original)


def sums(rank, world_size):
    values = {"tokens": torch.tensor(10 * rank + 1), "loss": torch.tensor(0.5 * rank, requires_grad=True)}
    if rank % 2:  # the order of insertion is no part of the meaning
        values = dict(reversed(values.items()))
    with counted("all_reduce") as calls:
        result = sum_over_ranks(values, dist.group.WORLD)
    assert list(result) == list(values)
    return {name: (value.item(), value.dtype, value.requires_grad) for name, value in result.items()}, len(
        calls
    )


@pytest.mark.parametrize("size, tokens, loss", [(1, 1.0, 0.0), (2, 12.0, 0.5), (4, 64.0, 3.0)])
def test_sums_by_name_in_one_all_reduce(worlds, size, tokens, loss):
    expected = {"tokens": (tokens, torch.float64, False), "loss": (loss, torch.float64, False)}
    assert worlds(size).run(sums) == [(expected, 1)] * size


def large_sum(rank, world_size):
    """2^25 + 1 has no fp32 neighbour of its own: a sum in fp32 loses the ones."""
    ones = [torch.tensor(float(2**25)), torch.tensor(1.0)][rank]
    return sum_over_ranks({"tokens": ones}, dist.group.WORLD)["tokens"].item()


def test_sum_is_in_float64(worlds):
    assert worlds(2).run(large_sum) == [2.0**25 + 1] * 2


def nothing(rank, world_size):
    return sum_over_ranks({}, dist.group.WORLD)


def test_no_values_sum_to_nothing(worlds):
    assert worlds(2).run(nothing) == [{}, {}]


def different_keys(rank, world_size, keys):
    values = {key: torch.tensor(1.0) for key in keys[rank]}
    try:
        sum_over_ranks(values, dist.group.WORLD)
    except ValueError as error:
        message = str(error)
    after = sum_over_ranks({"loss": torch.tensor(1.0)}, dist.group.WORLD)["loss"].item()
    return message, after


@pytest.mark.parametrize(
    "keys, parts",
    [
        ([["loss"], ["loss", "kl"]], ["'kl' is missing on rank(s) [0]"]),
        ([["loss", "kl"], ["loss"]], ["'kl' is missing on rank(s) [1]"]),
        ([["loss"], []], ["'loss' is missing on rank(s) [1]"]),
        ([["a"], ["b"]], ["'a' is missing on rank(s) [1]", "'b' is missing on rank(s) [0]"]),
    ],
)
def test_different_keys_raise_on_every_rank_and_leave_the_group_usable(worlds, keys, parts):
    replies = worlds(2).run(different_keys, keys)
    assert replies[0] == replies[1]
    message, after = replies[0]
    assert all(part in message for part in parts) and "'loss' is missing on rank(s) []" not in message
    assert after == 2.0


def test_sum_without_group_is_the_value():
    result = sum_over_ranks({"loss": torch.tensor(0.1, requires_grad=True), "n": torch.tensor(3)}, None)
    assert result == {"loss": torch.tensor(0.1).double(), "n": torch.tensor(3.0, dtype=torch.float64)}
    assert not result["loss"].requires_grad


def ragged(rank, world_size, counts, dtype):
    start = sum(counts[:rank])
    rows = torch.arange(start, start + counts[rank])[:, None].expand(-1, 3).to(dtype)  # row i is [i, i, i]
    with counted("all_gather") as calls:
        result = gather_ragged_rows(rows, dist.group.WORLD)
    return result, len(calls)


@pytest.mark.parametrize("counts", [[3], [2, 2], [3, 1], [0, 2], [2, 0], [0, 0], [1, 0, 4, 2], [0, 0, 0, 1]])
def test_rows_come_in_rank_order_without_padding(worlds, counts):
    expected = torch.arange(sum(counts))[:, None].expand(-1, 3)
    for result, calls in worlds(len(counts)).run(ragged, counts, torch.int64):
        assert torch.equal(result, expected) and result.shape == (sum(counts), 3)
        assert calls <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_rows_keep_their_dtype(worlds, dtype):
    for result, _ in worlds(2).run(ragged, [1, 2], dtype):
        assert torch.equal(result, torch.arange(3)[:, None].expand(-1, 3).to(dtype)) and result.dtype == dtype


def flags(rank, world_size):
    rows = torch.tensor([[True, False]] if rank == 0 else [[False, True], [True, True]])
    scalars = torch.full((rank,), float(rank), requires_grad=True)
    return gather_ragged_rows(rows, dist.group.WORLD), gather_ragged_rows(scalars, dist.group.WORLD)


def test_rows_may_be_flags_or_numbers(worlds):
    for rows, scalars in worlds(2).run(flags):
        assert rows.tolist() == [[True, False], [False, True], [True, True]] and rows.dtype == torch.bool
        assert scalars.tolist() == [1.0] and not scalars.requires_grad


def rows_without_columns(rank, world_size):
    return tuple(gather_ragged_rows(torch.empty(rank + 1, 0), dist.group.WORLD).shape)


def test_rows_without_columns_are_counted(worlds):
    assert worlds(2).run(rows_without_columns) == [(3, 0)] * 2


def different_rows(rank, world_size, shapes, dtypes):
    try:
        gather_ragged_rows(torch.zeros(shapes[rank], dtype=dtypes[rank]), dist.group.WORLD)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "shapes, dtypes",
    [
        ([(2, 3), (2, 4)], [torch.float32] * 2),
        ([(2, 6), (2, 2, 3)], [torch.float32] * 2),  # as many numbers in a row
        ([(0, 3), (0, 4)], [torch.float32] * 2),
        ([(2, 3), (2, 3)], [torch.float32, torch.int32]),
    ],
)
def test_rows_of_different_kinds_raise_on_every_rank(worlds, shapes, dtypes):
    replies = worlds(2).run(different_rows, shapes, dtypes)
    kinds = ", ".join(f"{list(shape[1:])} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True))
    assert replies == [f"ranks gather rows of different kinds: {kinds}"] * 2


def test_rows_without_group_are_the_rows():
    rows = torch.arange(6.0, requires_grad=True).view(2, 3)
    result = gather_ragged_rows(rows, None)
    assert torch.equal(result, rows) and not result.requires_grad


def rows_of_halves(rank, world_size):
    """Two data-parallel groups beside each other: {0, 2} and {1, 3}."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    total = sum_over_ranks({"rank": torch.tensor(float(rank))}, group)["rank"].item()
    rows = gather_ragged_rows(torch.full((rank, 1), rank), group).flatten().tolist()
    for each in groups:
        if dist.get_rank(each) >= 0:
            dist.destroy_process_group(each)
    return total, rows


def test_groups_do_not_mix(worlds):
    even, odd = (2.0, [2, 2]), (4.0, [1, 3, 3, 3])
    assert worlds(4).run(rows_of_halves) == [even, odd, even, odd]
