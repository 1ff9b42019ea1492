"""Whom the trainer tells: where a run is written down, and where its state is kept."""

from typing import Any, Protocol

from torch import Tensor

from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.training.collect import CollectedStep
from tepo_nemo.training.progress import SavedProgress


class Recorder(Protocol):
    """Where a run is written down; ranks that write nothing have one that does nothing."""

    def step(
        self, step: int, metrics: dict[str, float], kept: ScoredBatch | None, advantages: Tensor | None
    ) -> None:
        """Metrics of a step and the responses that it trained on."""

    def rollout(self, step: int, collected: CollectedStep) -> None:
        """What a step trains on, told before it does; the first step is 1."""

    def bad_update(self, step: int, update: int, why: str, collected: CollectedStep) -> None:
        """An update of a step, both counted from 1, that was not made."""

    def go_back(self, step: int) -> None:
        """Forget the steps after a step: they are taken again."""

    def message(self, text: str) -> None:
        """Tell a person a line."""

    def flush(self) -> None:
        """Return when everything told is written."""


class Saver(Protocol):
    """Where the state of a run is kept; called by all ranks."""

    failed: int  # saves of the run that have failed

    def save(
        self,
        state: dict[str, Any],
        progress: SavedProgress | None,
        metrics: dict[str, float],
        *,
        required: bool,
    ) -> None:
        """Write the policy and the trainer's state. A failure is told and counted, unless it is required.

        Args:
            state: JSON of `Trainer.state_dict`.
            progress: of a step that was stopped between two updates.
            metrics: of the last finished step.
            required: the run ends after it; a failure is raised, and nothing is left under way.
        """
        ...

    def has(self, step: int) -> bool:
        """Whether the state after `step` is kept. Waits for what is being written in the background."""
        ...

    def poll(self) -> None:
        """Finish what is being written in the background, if it is ready."""
        ...
