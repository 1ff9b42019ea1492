"""Counts that do not flake: collectives, what they carry, allocations, and what is kept for the backward."""

import pytest
import torch
import torch.distributed as dist
from support.allocations import Allocations

from tepo_nemo.parallel import vocab_shard
from tepo_nemo.parallel.vocab import vocab_parallel_logprob_entropy

V = 128


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


COLLECTIVES = ("all_", "reduce", "broadcast", "gather", "scatter")


def count_collectives(patch):
    """Bytes of the tensor that each call brings along, counted at the functions of torch.distributed."""
    calls = []

    def counted(original):
        def call(*arguments, **keywords):
            calls.append(sum(each.nbytes for each in arguments if isinstance(each, torch.Tensor)))
            return original(*arguments, **keywords)

        return call

    for name in dir(dist):
        if name.startswith(COLLECTIVES):
            patch.setattr(dist, name, counted(getattr(dist, name)))
    return calls


def cost(rank, world_size, logits, rows, overwrite):
    """Bytes of each collective and each allocation, forward and backward, and the bytes saved in between."""
    # Logits come out of a matrix product: no leaf, whose gradient would be copied.
    shard = logits.chunk(world_size, -1)[rank].clone().requires_grad_().mul(1)
    target, mask = torch.arange(len(logits)), torch.ones(len(logits), dtype=torch.bool)
    forward, backward, saved = Allocations(), Allocations(), {}

    def keep(tensor):
        return saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vocab_shard.CHUNK_LOGITS, "cpu", 2 * rows * shard.shape[-1])
        calls = count_collectives(patch)
        with forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprob, entropy = vocab_parallel_logprob_entropy(
                shard,
                target,
                dist.group.WORLD,
                temperature=0.6,
                vocab_size=V,
                mask=mask,
                entropy_requires_grad=True,
                overwrite_logits=overwrite,
            )
        calls_forward = len(calls)
        loss = logprob.sum() + entropy.sum()
        gradients = torch.autograd.grad(loss, [logprob, entropy])
        with backward:
            torch.autograd.grad([logprob, entropy], [shard], gradients)
    kept = sum(tensor.nbytes for tensor in saved.values())
    return calls[:calls_forward], calls[calls_forward:], sorted(forward.sizes), sorted(backward.sizes), kept


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("rows", [1, 10, 1000])
def test_one_collective_forward_none_backward_and_small_temporaries(worlds, rows, overwrite, dtype, size):
    """Of tokens x vocabulary there is one tensor, the gradient, or none where that takes the logits' place;
    the rest is chunks or numbers a token."""
    tokens, width = 100, V // size
    logits = normal(tokens, V).to(dtype)
    chunk = min(rows, tokens) * width * 4
    statistics = 4 * tokens * 4  # m, S, D and z_target - m of each token
    gradient = tokens * width * dtype.itemsize
    for forward, backward, made_forward, made_backward, kept in worlds(size).run(
        cost, logits, rows, overwrite
    ):
        assert forward == [statistics] and backward == []
        assert made_forward[-1] <= max(chunk, statistics * size)
        if not overwrite:
            assert gradient in made_backward
            made_backward.remove(gradient)
        assert made_backward[-1] <= max(chunk, 8 * tokens)
        # Beside the logits: target 8, mask 1, and four numbers of 4 bytes a token.
        assert kept <= gradient + tokens * (8 + 1 + 4 * 4)


def allocations_for_transposed(rank, world_size):
    logits, target = normal(10, 20, V).transpose(0, 1), torch.zeros(20, 10, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch, Allocations() as made:
        patch.setitem(vocab_shard.CHUNK_LOGITS, "cpu", 2 * 5 * V)
        vocab_parallel_logprob_entropy(logits, target, None, temperature=1.0, vocab_size=V)
    return max(made.sizes)


def test_logits_that_are_not_contiguous_are_not_copied_as_a_whole(worlds):
    chunk, statistics = 5 * V * 4, 4 * 4 * 200
    assert worlds(1).run(allocations_for_transposed) == [max(chunk, statistics)]
