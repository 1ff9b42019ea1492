"""A causal language model of 256 parameters, and the trainer's `Policy` on it, in plain torch.

Everything is float64, so that two ways to the same weights may be compared to many digits. Over a process
group the ranks are data-parallel: each holds the model and takes its share of a mini-batch.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tepo_nemo.objectives.contract import Mean, Objective
from tepo_nemo.parallel.data import gather_ragged_rows, sum_over_ranks
from tepo_nemo.parallel.finite import first_ranks_not_finite
from tepo_nemo.parallel.vocab import vocab_parallel_logprob_entropy
from tepo_nemo.rollout.correction import RolloutCorrection
from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.rollout.sampling import row_keys, sample_tokens
from tepo_nemo.training.batch import MicroBatch, MiniBatch, TokenStatistics, add_means
from tepo_nemo.training.metrics import logprob_gap, weight_metrics
from tepo_nemo.training.policy import Gradient

STOP = 0
# Token 3 spells what tokens 1 and 2 spell in a row: text does not tell which of the two was sampled.
SPELLING = ("<stop>", "a", "b", "ab", "c", "1", "2")
VOCAB_SIZE = len(SPELLING)
PADDED_VOCAB_SIZE = 8


def spell(tokens: Sequence[int]) -> str:
    """The text of token ids."""
    return "".join(SPELLING[token] for token in tokens)


def respell(text: str) -> list[int]:
    """Token ids of a text, longest spelling first: what a tokenizer would make of it."""
    tokens = []
    while text:
        token = max(
            (t for t in range(1, VOCAB_SIZE) if text.startswith(SPELLING[t])), key=lambda t: len(SPELLING[t])
        )
        tokens.append(token)
        text = text[len(SPELLING[token]) :]
    return tokens


class TinyLM(nn.Module):
    """Each position sees its own token and the mean of all embeddings up to it."""

    def __init__(self, seed: int = 0, hidden: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7)

        self.embedding = parameter(PADDED_VOCAB_SIZE, hidden)
        self.mixer = parameter(2 * hidden, hidden)
        self.head = parameter(hidden, PADDED_VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [S, L, PADDED_VOCAB_SIZE] of token ids [S, L]."""
        own = self.embedding[tokens]
        seen = own.cumsum(dim=1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        return torch.tanh(torch.cat([own, seen], dim=-1) @ self.mixer) @ self.head


class TorchPolicy:
    """Implements `Policy`, and asserts that its methods are called in the order of the life cycle."""

    length_multiple = 1
    attention_length = 10**6

    def __init__(
        self,
        objective: Objective,
        *,
        temperature: float = 1.0,
        momentum: float = 0.0,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        correction: RolloutCorrection | None = None,
    ) -> None:
        self.model = TinyLM(seed)
        self.correction = correction
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=momentum)
        self.objective = objective
        self.temperature = temperature
        self.group = group
        self.data_parallel_rank = 0 if group is None else dist.get_rank(group)
        self.data_parallel_size = 1 if group is None else dist.get_world_size(group)
        self.is_main = self.data_parallel_rank == 0
        self.learning_rates: list[float] = []
        self._phase = "idle"
        self.reference = deepcopy(self.model) if objective.needs_reference else None

    def _turn(self, before: str, after: str) -> None:
        assert self._phase in before.split("|"), f"{before} -> {after} while in {self._phase}"
        self._phase = after

    def weights(self) -> Tensor:
        """All parameters in one vector, a copy."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def state(self) -> dict[str, Any]:
        """A copy of what a checkpoint would hold."""
        return deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))  # else its tensors are taken as they are

    # ----------------------------------------------------------------- rollouts

    def prepare_for_inference(self) -> None:
        self._turn("idle", "inference")

    @torch.no_grad()
    def infer(self, request: GenerationRequest) -> Generation:
        """Every rank generates everything, and every token by a forward over the whole sequence."""
        assert self._phase == "inference"
        rows, limits = torch.arange(len(request)), torch.tensor(request.max_response_lengths)
        limit = int(limits.max())
        prompts = torch.tensor([len(prompt) for prompt in request.prompt_tokens])
        sequences = torch.zeros(len(rows), int(prompts.max()) + limit, dtype=torch.int64)
        for row, prompt in enumerate(request.prompt_tokens):
            sequences[row, : len(prompt)] = torch.tensor(prompt)
        keys = row_keys(request.seed, request.prompt_keys, request.sample_indices, torch.device("cpu"))
        tokens, logprobs = torch.zeros(len(rows), limit, dtype=torch.int64), torch.zeros(len(rows), limit)
        for position in range(limit):
            tokens[:, position], logprobs[:, position] = sample_tokens(
                self.model(sequences)[rows, prompts + position - 1],
                keys,
                torch.full_like(rows, position),
                temperature=request.temperature,
                vocab_size=VOCAB_SIZE,
                group=None,
            )
            sequences[rows, prompts + position] = tokens[:, position]
        stops = (tokens == STOP) & (torch.arange(limit) < limits[:, None])
        finished = stops.any(dim=1)
        lengths = torch.where(finished, stops.int().argmax(dim=1) + 1, limits)
        longest = int(lengths.max())  # what follows a stop token is junk, as the protocol allows
        return Generation(tokens[:, :longest], lengths, finished, logprobs[:, :longest])

    def finish_inference(self) -> None:
        self._turn("inference", "idle")

    # ----------------------------------------------------------------- training

    def prepare_for_training(self) -> None:
        self._turn("idle", "training")

    @torch.no_grad()
    def get_token_statistics(self, mini_batches: Sequence[MiniBatch]) -> list[list[TokenStatistics]]:
        assert self._phase == "training"
        return [[self._statistics(micro, False) for micro in mini.micro_batches] for mini in mini_batches]

    @torch.no_grad()
    def get_reference_logprobs(self, mini_batches: Sequence[MiniBatch]) -> list[list[Tensor]]:
        assert self._phase == "training"
        return [
            [self._statistics(micro, False, self.reference).logprobs for micro in mini.micro_batches]
            for mini in mini_batches
        ]

    def prepare_for_training_step(self) -> None:
        self._turn("training|clipped", "update")  # "clipped": the update before was not made
        self.optimizer.zero_grad()

    def get_loss_and_metrics(self, batch: MiniBatch, forward_only: bool) -> tuple[Tensor, dict[str, Mean]]:
        assert self._phase == "update" and not forward_only
        total, metrics = torch.zeros((), dtype=torch.float64), {}
        for micro in batch.micro_batches:
            current = self._statistics(micro, self.objective.needs_entropy_gradient)
            tokens = micro.token_batch(current, self.correction)
            output = self.objective(tokens, batch.totals)
            output.loss.backward()
            total += output.loss.detach()
            of_sampler = logprob_gap(micro, tokens.old_logprobs) | weight_metrics(tokens)
            add_means(metrics, output.metrics | of_sampler)
        return total, metrics

    def finish_training_step(self) -> None:
        """Sum the gradients over data-parallel ranks: the shares of the loss add up, so do they."""
        if self.group is not None:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad, group=self.group)

    def clip_gradient(self, loss: Tensor | None, metrics: dict[str, Mean]) -> Gradient:
        """Nothing is clipped."""
        self._turn("update", "clipped")
        norm = float(torch.cat([p.grad.flatten() for p in self.model.parameters()]).norm())
        watched = {"loss": loss, "ratio": metrics["ratio/mean"].numerator, "norm": norm}
        return Gradient(norm, first_ranks_not_finite(watched, self.group))

    def optimizer_step(self, learning_rate: float) -> None:
        self._turn("clipped", "training")
        self.learning_rates.append(learning_rate)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()

    def finish_training(self) -> None:
        self._turn("training|clipped", "idle")

    def _statistics(
        self, micro: MicroBatch, entropy_requires_grad: bool, model: TinyLM | None = None
    ) -> TokenStatistics:
        return TokenStatistics(
            *vocab_parallel_logprob_entropy(
                (model or self.model)(micro.inputs),
                micro.targets,
                None,
                temperature=self.temperature,
                vocab_size=VOCAB_SIZE,
                mask=micro.mask,
                entropy_requires_grad=entropy_requires_grad,
            )
        )

    # ----------------------------------------------------------------- communication

    def reduce_metrics(self, metrics: dict[str, Mean]) -> dict[str, float]:
        numerators = sum_over_ranks({name: mean.numerator for name, mean in metrics.items()}, self.group)
        denominators = sum_over_ranks({name: mean.denominator for name, mean in metrics.items()}, self.group)
        return {name: float(numerators[name] / denominators[name]) for name in metrics}  # 0 / 0 is NaN

    def gather_rows(self, rows: Tensor) -> Tensor:
        return gather_ragged_rows(rows, self.group)

    def broadcast_from_main(self, value: Any) -> Any:
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def max_over_ranks(self, value: int) -> int:
        if self.group is None:
            return value
        values: list[int] = [0] * self.data_parallel_size
        dist.all_gather_object(values, value, group=self.group)
        return max(values)

    def weights_fingerprint(self) -> int:
        return int(self.weights().view(torch.int64).sum())


class Broken(TorchPolicy):
    """Loss, ratio or gradient is not finite on one rank, from one update (the first is 1) to another."""

    def __init__(self, *args: Any, what: str, first: int, last: int, rank: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.what, self.first, self.last, self.rank = what, first, last, rank
        self.number = 0

    def get_loss_and_metrics(self, batch: MiniBatch, forward_only: bool) -> tuple[Tensor, dict[str, Mean]]:
        loss, metrics = super().get_loss_and_metrics(batch, forward_only)
        self.number += 1
        if self.rank != self.data_parallel_rank or not self.first <= self.number <= self.last:
            return loss, metrics
        if self.what == "loss":
            return loss * float("nan"), metrics
        if self.what == "ratio":
            mean = metrics["ratio/mean"]
            return loss, metrics | {"ratio/mean": Mean(mean.numerator + float("inf"), mean.denominator)}
        self.model.head.grad[0, 0] = float("nan")
        return loss, metrics
