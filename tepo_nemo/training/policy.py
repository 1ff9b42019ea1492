"""What the trainer needs of a policy; the host layer implements it on a Megatron model."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tepo_nemo.objectives.contract import Mean
from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.training.batch import MiniBatch, TokenStatistics


class Gradient(NamedTuple):
    """The gradient of one update, clipped and not yet applied; the same on every rank."""

    norm: float  # before clipping, over the whole model
    not_finite: dict[str, int]  # of `guard.WATCHED` what is not, with the first rank that has it so


class Policy(Protocol):
    """A language model under training, with NeMo-Aligner's life cycle.

    Every method is called by all ranks in the same order. Rollouts go in and come out whole (the same on
    every rank); mini-batches are this rank's share.
    """

    data_parallel_rank: int
    data_parallel_size: int
    is_main: bool  # the one rank that grades and writes files
    length_multiple: int  # lengths of micro-batches are multiples of this (sequence parallelism)
    attention_length: int  # of a sequence whose attention costs as much as all else (see `balance`)

    def prepare_for_inference(self) -> None: ...

    def infer(self, request: GenerationRequest) -> Generation: ...

    def finish_inference(self) -> None: ...

    def prepare_for_training(self) -> None: ...

    def get_token_statistics(self, mini_batches: Sequence[MiniBatch]) -> list[list[TokenStatistics]]:
        """Log-prob and entropy under the current weights, forward only, a list a mini-batch."""
        ...

    def get_reference_logprobs(self, mini_batches: Sequence[MiniBatch]) -> list[list[Tensor]]:
        """Log-prob [S, L] under the frozen reference policy, forward only, a list a mini-batch.

        The reference is the weights that the run started from; there is one where the objective needs it.
        """
        ...

    def prepare_for_training_step(self) -> None: ...

    def get_loss_and_metrics(
        self, batch: MiniBatch, forward_only: bool
    ) -> tuple[Tensor | None, dict[str, Mean]]:
        """Forward (and backward) over this rank's micro-batches.

        Returns this rank's share of the loss and of each metric, for `reduce_metrics`; None and nothing on
        pipeline stages without the loss.
        """
        ...

    def finish_training_step(self) -> None: ...

    def clip_gradient(self, loss: Tensor | None, metrics: dict[str, Mean]) -> Gradient:
        """Clip the gradient that the ranks share, and see whether the update is sound on all of them.

        An update that is not made needs nothing more: the next one starts from a gradient of zero.

        Args:
            loss, metrics: from `get_loss_and_metrics`.
        """
        ...

    def optimizer_step(self, learning_rate: float) -> None:
        """Move the weights by the clipped gradient."""
        ...

    def finish_training(self) -> None: ...

    def reduce_metrics(self, metrics: dict[str, Mean]) -> dict[str, float]:
        """Sum numerators and denominators over data-parallel ranks and divide; the same on every rank."""
        ...

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows of all data-parallel ranks, in rank order, on the host of every rank.

        Their number may differ between ranks, the rest of their shape may not.
        """
        ...

    def broadcast_from_main(self, value: Any) -> Any:
        """The main rank's `value` on every rank."""
        ...

    def max_over_ranks(self, value: int) -> int:
        """The largest of all ranks' values."""
        ...

    def weights_fingerprint(self) -> int:
        """A number of all ranks' weights, the same on every rank; as good as another for other weights."""
        ...
