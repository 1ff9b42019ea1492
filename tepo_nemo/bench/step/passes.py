"""Counts what passes through a model, by what the passes are for, and how evenly ranks share them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

import torch
from torch.optim import Optimizer


class Purpose(Enum):
    GENERATION = "generation"
    STATISTICS = "statistics"  # forward only
    TRAINING = "training"


class Shape(NamedTuple):
    """Of the input of a forward pass."""

    rows: int
    positions: int


class Passes:
    """What one rank has sent through its model."""

    def __init__(self) -> None:
        self.shapes: dict[Purpose, list[Shape]] = defaultdict(list)
        self.updates: list[list[Shape]] = []  # the training passes of each optimizer update
        self._of_update: list[Shape] = []

    def add(self, purpose: Purpose, shape: Shape) -> None:
        self.shapes[purpose].append(shape)
        if purpose is Purpose.TRAINING:
            self._of_update.append(shape)

    def end_update(self) -> None:
        self.updates.append(self._of_update)
        self._of_update = []

    def rows(self, *purposes: Purpose, shortest: int) -> int:
        """Sequences that passed; a row below `shortest` positions fills an empty micro-batch and is none."""
        shapes = (shape for purpose in purposes for shape in self.shapes[purpose])
        return sum(shape.rows for shape in shapes if shape.positions >= shortest)

    def positions(self, *purposes: Purpose) -> int:
        return sum(shape.rows * shape.positions for purpose in purposes for shape in self.shapes[purpose])


@contextmanager
def counting_passes(model: torch.nn.Module, optimizer: Optimizer) -> Iterator[Passes]:
    """Count the forward calls of `model`, which takes ids [rows, positions] as Megatron's GPT models do."""
    passes = Passes()

    def count(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if kwargs.get("inference_params") is not None:
            purpose = Purpose.GENERATION
        else:
            purpose = Purpose.TRAINING if torch.is_grad_enabled() else Purpose.STATISTICS
        passes.add(purpose, Shape(*ids.shape))

    hooks = (
        model.register_forward_pre_hook(count, with_kwargs=True),
        optimizer.register_step_post_hook(lambda *_: passes.end_update()),
    )
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def padding_fraction(passed: int, needed: int) -> float:
    """Share of the positions that passed the model for nothing."""
    return 1 - needed / passed


def layer_flops(shape: Shape, hidden: int, feed_forward: int) -> int:
    """Multiplications and additions of one transformer layer's forward pass, a gated feed-forward in it.

    A token has 8 h^2 for query, key, value and output, 6 h f for the feed-forward, and 4 h for each position
    that it is compared with; without a fused kernel causal attention compares all of them.
    """
    rows, positions = shape
    token = 8 * hidden**2 + 6 * hidden * feed_forward
    return rows * positions * (token + 4 * hidden * positions)


def imbalance(updates_of_ranks: Sequence[Sequence[int]]) -> float:
    """By how much the slowest ranks exceed the mean, over all updates: ranks wait for each other at each.

    Args:
        updates_of_ranks: work of each update, by rank.
    """
    updates = list(zip(*updates_of_ranks, strict=True))
    return sum(map(max, updates)) * len(updates_of_ranks) / sum(map(sum, updates)) - 1
