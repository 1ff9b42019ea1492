"""A step of any trainer."""

from typing import NamedTuple, Protocol

from torch.optim import Optimizer

CATEGORIES = ("generation", "statistics", "training")


class Taken(NamedTuple):
    """Seconds by category, from the trainer's own timers, and the tokens that its loss was taken of."""

    generation: float
    statistics: float  # the forward-only pass under the old weights
    training: float  # with the optimizer
    trained_tokens: int  # tokens that the loss was taken of, over all data-parallel ranks


class Step(Protocol):
    """Takes one step a call."""

    actor: object  # a model of NeMo's
    optimizer: Optimizer

    def __call__(self) -> Taken: ...
