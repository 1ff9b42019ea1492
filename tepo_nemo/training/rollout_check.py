"""The rollout engine held against the policy: at the first two steps, and then now and again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tepo_nemo.objectives.contract import Mean
from tepo_nemo.rollout.batch import RolloutBatch, TokenizedPrompt
from tepo_nemo.rollout.check import Gap, GapLimits, check_samples, judge, same_answers
from tepo_nemo.rollout.protocol import Generation, GenerationRequest, RolloutError
from tepo_nemo.rollout.sampling import prompt_key, stream_seed
from tepo_nemo.training.batch import MicroBatch, MiniBatch, add_means
from tepo_nemo.training.policy import Policy

_PROBE_ROWS, _PROBE_TOKENS = 8, 16


class RolloutCheck:
    """When the rollouts of a step are held against the policy, and how far they may be from it.

    The first check of a process shows whether the engine is the model; the second is the first with refitted
    weights.

    Args:
        interval: steps between two checks; 0 for those two alone.
        engine: what generates.
        temperature: of the rollouts.
    """

    def __init__(self, interval: int, limits: GapLimits, *, engine: str, temperature: float) -> None:
        self._interval, self._limits = interval, limits
        self._engine, self._temperature = engine, temperature
        self._made = 0

    def due(self, step: int) -> bool:
        """Whether the step after `step` finished ones is checked."""
        return self._made < 2 or bool(self._interval and step % self._interval == 0)

    def compare(
        self, policy: Policy, step: int, mini_batches: Sequence[MiniBatch], rollouts: RolloutBatch
    ) -> None:
        """Check a step before its first update. All ranks come to the same.

        Args:
            mini_batches: those with old statistics are compared.

        Raises:
            RolloutError: the engine is not the policy, or its samples are not drawn apart.
        """
        self._made += 1
        measured = [micro for mini in mini_batches for micro in mini.micro_batches if micro.old is not None]
        gap = measure_gap(policy, measured)
        if gap is not None:
            judge(gap, self._limits, step=step + 1, engine=self._engine, temperature=self._temperature)
        check_samples(rollouts.groups, rollouts.generation)


def measure_gap(policy: Policy, micro_batches: Sequence[MicroBatch]) -> Gap | None:
    """Over the trained tokens of all ranks; None where there are none."""
    means: dict[str, Mean] = {}
    largest = [torch.zeros(0, 4, dtype=torch.float64)]
    for micro in micro_batches:
        assert micro.old is not None and micro.sampled_logprobs is not None
        gap = (micro.old.logprobs.cpu() - micro.sampled_logprobs).double().abs().where(micro.mask, 0)
        column = micro.mask.cumsum(1) - 1
        early = micro.mask & (2 * column < micro.mask.sum(1, keepdim=True))
        parts = {"mean": micro.mask, "early": early, "late": micro.mask & ~early}
        add_means(means, {name: _mean(gap, part) for name, part in parts.items()})
        add_means(means, {"error": _mean(gap.clamp(max=20).exp(), micro.mask)})
        if bool(micro.mask.any()):
            largest.append(_largest(gap, column, micro))
    found = policy.reduce_metrics(means)
    rows = policy.gather_rows(torch.cat(largest))
    if not len(rows):
        return None
    value, row, column, token = rows[rows[:, 0].argmax()].tolist()
    return Gap(**found, largest=value, row=int(row), column=int(column), token=int(token))


def _mean(values: Tensor, mask: Tensor) -> Mean:
    return Mean(values.where(mask, 0).sum(), mask.sum().double())


def _largest(gap: Tensor, column: Tensor, micro: MicroBatch) -> Tensor:
    """[1, 4] float64: the largest gap of a micro-batch, its response, its place there and its token."""
    place = int(gap.argmax())
    at = divmod(place, gap.shape[1])
    numbers = [float(gap[at]), int(micro.rows[at[0]]), int(column[at]), int(micro.targets[at])]
    return torch.tensor([numbers], dtype=torch.float64)


class RefitProbe:
    """Looks once whether the engine's answers change where the weights have changed.

    Asks one small request before the first update and again after it. Where the updates were too small to
    change any weight, it goes on to the next step.

    Args:
        prompts: of the training set.
        seed: of the run.
    """

    def __init__(
        self,
        prompts: Sequence[TokenizedPrompt],
        *,
        seed: int,
        temperature: float,
        max_response_length: int,
        engine: str,
    ) -> None:
        self._prompts, self._seed, self._temperature = prompts, seed, temperature
        self._limit = min(_PROBE_TOKENS, max_response_length)
        self._engine = engine
        self._before: tuple[int, Generation] | None = None
        self._done = False

    def look(self, policy: Policy) -> None:
        """Called between `prepare_for_inference` and `finish_inference` of every step.

        Raises:
            RolloutError: the weights have changed and the answers have not.
        """
        if self._done:
            return
        weights = policy.weights_fingerprint()
        if self._before is not None and self._before[0] == weights:
            return
        now = policy.infer(self._request(policy.data_parallel_size))
        if self._before is None:
            self._before = (weights, now)
            return
        if same_answers(self._before[1], now):
            raise RolloutError(
                f"{self._engine} answers to the last bit as it did with other weights: the refit of its "
                "weights has no effect"
            )
        self._done, self._before = True, None

    def _request(self, data_parallel_size: int) -> GenerationRequest:
        """Some rows for each copy of the model."""
        rows = _PROBE_ROWS * data_parallel_size
        prompts = [self._prompts[row % len(self._prompts)] for row in range(rows)]
        return GenerationRequest(
            prompt_tokens=[prompt.tokens for prompt in prompts],
            prompt_keys=[prompt_key(prompt.prompt.id) for prompt in prompts],
            sample_indices=list(range(rows)),
            seed=stream_seed(self._seed, "probe", 0),
            temperature=self._temperature,
            max_response_lengths=[self._limit] * rows,
        )
