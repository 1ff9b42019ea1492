"""A whole training run on `torch_policy`: prompts, a reward, and a trainer that is told what differs."""

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import yaml
from support.torch_policy import TorchPolicy, spell
from torch import Tensor

from tepo_nemo.data.order import PromptOrder
from tepo_nemo.data.prompts import Prompt
from tepo_nemo.objectives import registry
from tepo_nemo.objectives.contract import Mean, Objective
from tepo_nemo.reward.result import RewardFunction, RewardResult
from tepo_nemo.rollout.batch import ScoredBatch, TokenizedPrompt
from tepo_nemo.rollout.check import GapLimits
from tepo_nemo.rollout.scoring import Grader
from tepo_nemo.runs.files import to_json
from tepo_nemo.training.batch import MiniBatch, TokenStatistics
from tepo_nemo.training.collect import CollectedStep, Collector, StepCollector
from tepo_nemo.training.progress import SavedProgress
from tepo_nemo.training.replay import RolloutReader
from tepo_nemo.training.rollout_check import RefitProbe, RolloutCheck
from tepo_nemo.training.settings import TrainerSettings
from tepo_nemo.training.timers import PhaseTimers
from tepo_nemo.training.trainer import Trainer

SHARED_KEYS = {"name", "advantage", "overlong_fraction", "dynamic_sampling", "max_generation_batches"}
# Of different lengths; the gold letter is what a good response holds.
PROMPTS = [
    TokenizedPrompt(Prompt(f"p{number}", spell(tokens), gold), tokens)
    for number, (tokens, gold) in enumerate(
        [([5], "a"), ([5, 6], "b"), ([6, 4, 5], "c"), ([1, 2], "1"), ([4], "2"), ([3, 3, 3, 3], "a")]
    )
]


CHECK_LIMITS = GapLimits(warn_gap=0.03, stop_gap=0.1, warn_error=1.05, stop_error=1.5)


@cache
def _preset(name: str) -> dict[str, Any]:
    path = Path(__file__).parents[2] / "configs" / "algorithm" / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def make_objective(preset: str = "tepo", **changes: Any) -> Objective:
    """The objective of a shipped preset, some options changed."""
    options = {key: value for key, value in _preset(preset).items() if key not in SHARED_KEYS}
    return registry.build(_preset(preset)["name"], options | changes)


def letter_reward(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """1 for a response that holds the gold letter; grading fails where the response starts with c."""
    if response_text.startswith("c"):
        raise RuntimeError("a verifier that fails now and then")
    return RewardResult(float(gold in response_text), "ok")


@dataclass
class Recording:
    """What the trainer told its recorder, step by step."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    kept: list[ScoredBatch | None] = field(default_factory=list)
    advantages: list[Tensor | None] = field(default_factory=list)
    collected: dict[int, CollectedStep] = field(default_factory=dict)
    bad_updates: list[tuple[int, int, str]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def rollout(self, step: int, collected: CollectedStep) -> None:
        self.collected[step] = collected

    def bad_update(self, step: int, update: int, why: str, collected: CollectedStep) -> None:
        assert collected is self.collected[step]
        self.bad_updates.append((step, update, why))

    def go_back(self, step: int) -> None:
        del self.metrics[step:], self.kept[step:], self.advantages[step:]

    def message(self, text: str) -> None:
        self.messages.append(text)

    def step(
        self, step: int, metrics: dict[str, float], kept: ScoredBatch | None, advantages: Tensor | None
    ) -> None:
        assert step == metrics["step"]
        self.metrics.append(metrics)
        self.kept.append(kept)
        self.advantages.append(advantages)

    def flush(self) -> None:
        """Nothing is on its way."""


def make_collector(
    policy: Any,
    reward: RewardFunction = letter_reward,
    prompts: list[TokenizedPrompt] = PROMPTS,
    timers: PhaseTimers | None = None,
    check_stop: Callable[[], None] = lambda: None,
    **changes: Any,
) -> StepCollector:
    """A collector of 4 prompts x 4 responses of up to 5 tokens, without dynamic sampling."""
    settings = dict(
        seed=1,
        prompts_per_step=4,
        responses_per_prompt=4,
        temperature=policy.temperature,
        max_response_length=5,
        prompts_at_once=None,
        dynamic_sampling=False,
        max_generation_batches=3,
    )
    settings |= changes
    order = PromptOrder(len(prompts), settings["seed"])
    timers = timers or PhaseTimers(lambda: None)
    return StepCollector(
        policy, Grader(policy, reward, spell), prompts, order, timers, check_stop, **settings
    )


class Saved(NamedTuple):
    """A checkpoint in memory."""

    state: dict[str, Any]
    progress: SavedProgress | None
    policy: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]


class MemorySaver:
    """Keeps every checkpoint. What it is told passes through the text of JSON, as in a file."""

    def __init__(self, policy: TorchPolicy) -> None:
        self._policy = policy
        self.failed = 0
        self.saved: list[Saved] = []

    def save(
        self,
        state: dict[str, Any],
        progress: SavedProgress | None,
        metrics: dict[str, float],
        *,
        required: bool,
    ) -> None:
        if progress is not None:
            progress = replace(progress, numbers=json.loads(to_json(progress.numbers)))
        self.saved.append(Saved(json.loads(json.dumps(state)), deepcopy(progress), self._policy.state()))

    def has(self, step: int) -> bool:
        return any(saved.step == step and saved.progress is None for saved in self.saved)

    def poll(self) -> None:
        """Nothing is on its way."""

    def go_back(self) -> dict[str, Any] | None:
        """The newest checkpoint of a whole step is in place again."""
        saved = next((each for each in reversed(self.saved) if each.progress is None), None)
        if saved is None:
            return None
        self._policy.load_state(saved.policy)
        return saved.state


@dataclass
class Run:
    """A trainer and what one wants to see of it."""

    trainer: Trainer
    policy: TorchPolicy
    recording: Recording
    saver: MemorySaver

    def resume(self, saved: Saved) -> None:
        """Go on from a checkpoint."""
        self.saver.saved.append(saved)
        self.policy.load_state(saved.policy)
        self.trainer.load_state_dict(saved.state, saved.progress)


def make_run(
    policy: TorchPolicy,
    *,
    reward: RewardFunction = letter_reward,
    prompts: list[TokenizedPrompt] = PROMPTS,
    dynamic_sampling: bool = False,
    evaluate: Callable[[], dict[str, float]] = dict,
    check_stop: Callable[[], None] = lambda: None,
    check_limits: GapLimits = CHECK_LIMITS,
    read_from: Mapping[int, Path] | None = None,
    **changes: Any,
) -> Run:
    """Three steps of two updates at a learning rate that moves the policy visibly.

    Args:
        read_from: dumps to train on, by step, in place of generating.
    """
    values = dict(
        seed=1,
        max_steps=3,
        prompts_per_step=4,
        responses_per_prompt=4,
        updates_per_rollout=2,
        micro_batch_size=2,
        micro_batch_tokens=None,
        sequence_packing=False,
        max_response_length=5,
        advantage="group",
        overlong_fraction=0.0,
        learning_rate=0.5,
        warmup_steps=0,
        save_interval=0,
        eval_interval=0,
        max_bad_updates=10,
        spike_factor=None,
        spike_window=4,
        spike_rewinds=0,
    )
    settings = TrainerSettings(**(values | changes))
    timers = PhaseTimers(lambda: None)
    collector: Collector = make_collector(
        policy,
        reward,
        prompts,
        timers,
        check_stop,
        seed=settings.seed,
        prompts_per_step=settings.prompts_per_step,
        responses_per_prompt=settings.responses_per_prompt,
        max_response_length=settings.max_response_length,
        dynamic_sampling=dynamic_sampling,
    )
    if read_from is not None:
        collector = RolloutReader(read_from, timers)
    recording, saver = Recording(), MemorySaver(policy)
    trainer = Trainer(
        settings,
        policy,
        policy.objective,
        collector,
        timers,
        recording,
        RolloutCheck(10, check_limits, engine="the tiny policy", temperature=policy.temperature),
        RefitProbe(
            prompts,
            seed=settings.seed,
            temperature=policy.temperature,
            max_response_length=settings.max_response_length,
            engine="the tiny policy",
        ),
        evaluate,
        saver,
        check_stop,
        saver.go_back,
    )
    return Run(trainer, policy, recording, saver)


class WatchedPolicy(TorchPolicy):
    """Remembers each update: the weights before it, its mini-batch and its metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.updates: list[tuple[Tensor, MiniBatch, dict[str, float]]] = []
        self.forward_passes = 0

    def get_token_statistics(self, mini_batches: Sequence[MiniBatch]) -> list[list[TokenStatistics]]:
        self.forward_passes += 1
        return super().get_token_statistics(mini_batches)

    def get_loss_and_metrics(self, batch: MiniBatch, forward_only: bool) -> tuple[Tensor, dict[str, Mean]]:
        before = self.weights()
        loss, metrics = super().get_loss_and_metrics(batch, forward_only)
        means = {name: float(mean.numerator / mean.denominator) for name, mean in metrics.items()}
        self.updates.append((before, batch, means))
        return loss, metrics


def world_group() -> dist.ProcessGroup | None:
    """All ranks of a test world; None in the test process."""
    return dist.group.WORLD if dist.is_initialized() else None
