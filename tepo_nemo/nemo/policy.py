"""The `Policy` of the trainer on a Megatron actor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.optim import Optimizer

from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel
from tepo_nemo.nemo.checkpoint import save_nemo
from tepo_nemo.nemo.optimizer import clip_gradient, step
from tepo_nemo.nemo.reference import FrozenReference
from tepo_nemo.objectives.contract import Mean
from tepo_nemo.parallel.data import gather_ragged_rows, sum_over_ranks
from tepo_nemo.parallel.pipeline import broadcast_object_from_last_stage
from tepo_nemo.rollout.protocol import Generation, GenerationRequest, no_responses
from tepo_nemo.training.batch import MiniBatch, TokenStatistics
from tepo_nemo.training.policy import Gradient


class MegatronPolicy:
    """Drives an actor and its optimizer; implements `Policy`."""

    def __init__(
        self, actor: MegatronGPTTEPOActorModel, optimizer: Optimizer, *, gradient_clip: float
    ) -> None:
        self._actor = actor
        self._optimizer = optimizer
        self._gradient_clip = gradient_clip
        self._reference: FrozenReference | None = None
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        self.is_main = dist.get_rank() == 0
        self.length_multiple = actor.length_multiple
        self.attention_length = 12 * actor.cfg.hidden_size

    # ----------------------------------------------------------------- rollouts

    def prepare_for_inference(self) -> None:
        self._actor.prepare_for_inference()

    def infer(self, request: GenerationRequest) -> Generation:
        """Split the rows over data-parallel ranks, generate, and gather the whole on every rank.

        Raises FloatingPointError on all ranks where the logits of one are not finite.
        """
        if not len(request):
            return no_responses()
        if self._actor.rollout.takes_all_rows:
            return self._actor.infer(request)
        size, rank = self.data_parallel_size, self.data_parallel_rank
        bounds = [len(request) * part // size for part in range(size + 1)]
        local = self._generate(request.rows(bounds[rank], bounds[rank + 1]))
        if size == 1:
            return local
        width = max(request.max_response_lengths)

        def widen(rows: Tensor) -> Tensor:
            return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))

        lengths = self.gather_rows(local.lengths)
        longest = int(lengths.max())
        return Generation(
            tokens=self.gather_rows(widen(local.tokens))[:, :longest],
            lengths=lengths,
            finished=self.gather_rows(local.finished.to(torch.uint8)).bool(),
            logprobs=self.gather_rows(widen(local.logprobs))[:, :longest],
        )

    def _generate(self, own: GenerationRequest) -> Generation:
        """This rank's responses; no rank is past it where one has failed, and waits for the rest."""
        error, local = None, no_responses()
        try:
            local = self._actor.infer(own)
        except FloatingPointError as raised:
            error = raised
        if self.max_over_ranks(error is not None):
            raise FloatingPointError("the model's logits are not finite: its weights are broken") from error
        return local

    def finish_inference(self) -> None:
        self._actor.finish_inference()

    # ----------------------------------------------------------------- training

    def prepare_for_training(self) -> None:
        self._actor.prepare_for_training()

    def get_token_statistics(self, mini_batches: Sequence[MiniBatch]) -> list[list[TokenStatistics]]:
        statistics = iter(
            self._actor.get_token_statistics([micro for mini in mini_batches for micro in mini.micro_batches])
        )
        return [[next(statistics) for _ in mini.micro_batches] for mini in mini_batches]

    def keep_reference(self) -> None:
        """Make the weights of this moment the reference policy; one kept earlier is let go of."""
        self._reference = FrozenReference(self._actor)

    def get_reference_logprobs(self, mini_batches: Sequence[MiniBatch]) -> list[list[Tensor]]:
        assert self._reference is not None, "no reference policy is kept"
        with self._reference.in_place():
            statistics = self.get_token_statistics(mini_batches)
        return [[of_micro.logprobs for of_micro in of_mini] for of_mini in statistics]

    def prepare_for_training_step(self) -> None:
        self._actor.prepare_for_training_step()

    def get_loss_and_metrics(
        self, batch: MiniBatch, forward_only: bool
    ) -> tuple[Tensor | None, dict[str, Mean]]:
        return self._actor.get_loss_and_metrics(batch, forward_only)

    def finish_training_step(self) -> None:
        self._actor.finish_training_step()

    def clip_gradient(self, loss: Tensor | None, metrics: dict[str, Mean]) -> Gradient:
        ratio = metrics.get("ratio/mean")
        return clip_gradient(
            self._actor,
            self._optimizer,
            gradient_clip=self._gradient_clip,
            loss=loss,
            ratio=None if ratio is None else ratio.numerator,
        )

    def optimizer_step(self, learning_rate: float) -> None:
        step(self._optimizer, learning_rate)

    def finish_training(self) -> None:
        self._actor.finish_training()

    # ----------------------------------------------------------------- communication

    def reduce_metrics(self, metrics: dict[str, Mean]) -> dict[str, float]:
        """Means over all data-parallel ranks, from the last pipeline stage; NaN where nothing was counted."""
        values = None
        if parallel_state.is_pipeline_last_stage():
            device = torch.cuda.current_device()
            sums = {
                f"{name}#{part}": value.to(device)
                for name, mean in metrics.items()
                for part, value in zip(
                    ("numerator", "denominator"), (mean.numerator, mean.denominator), strict=True
                )
            }
            sums = {
                name: float(value)
                for name, value in sum_over_ranks(sums, parallel_state.get_data_parallel_group()).items()
            }
            values = {
                name: sums[f"{name}#numerator"] / sums[f"{name}#denominator"]
                if sums[f"{name}#denominator"]
                else float("nan")
                for name in metrics
            }
        return broadcast_object_from_last_stage(
            values,
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_last_rank(),
        )

    def gather_rows(self, rows: Tensor) -> Tensor:
        group = parallel_state.get_data_parallel_group()
        return gather_ragged_rows(rows.to(torch.cuda.current_device()), group).cpu()

    def broadcast_from_main(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def max_over_ranks(self, value: int) -> int:
        """See `Policy`; over the whole world."""
        largest = torch.tensor(value, device=torch.cuda.current_device())
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    def weights_fingerprint(self) -> int:
        """The sum of all bits, as whole numbers: it neither rounds nor overflows to an error."""
        whole_number = {2: torch.int16, 4: torch.int32}
        device = torch.cuda.current_device()
        total = torch.zeros((), dtype=torch.int64, device=device)
        for chunk in self._actor.get_model_module_list():
            for parameter in chunk.parameters():
                total += parameter.detach().view(whole_number[parameter.element_size()]).sum()
        dist.all_reduce(total)
        return int(total)

    def save(self, path: Path) -> None:
        """Write the weights as a `.nemo` file; complete or not there at all."""
        save_nemo(self._actor, path)
