"""The parts of a run, each made from the configuration."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch

from tepo_nemo.config.flat import flat
from tepo_nemo.config.schema import Config
from tepo_nemo.data.order import PromptOrder
from tepo_nemo.nemo.policy import MegatronPolicy
from tepo_nemo.nemo.replay import Replay, about_run
from tepo_nemo.objectives.contract import Objective
from tepo_nemo.reward.pool import PoolSettings, open_reward
from tepo_nemo.rollout.batch import TokenizedPrompt
from tepo_nemo.rollout.check import GapLimits
from tepo_nemo.rollout.scoring import Grader
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import EVALUATION_PREFIX
from tepo_nemo.runs.trackers import openers
from tepo_nemo.training.collect import StepCollector
from tepo_nemo.training.protocols import Recorder, Saver
from tepo_nemo.training.recorder import RunRecorder
from tepo_nemo.training.replay import RolloutReader
from tepo_nemo.training.rollout_check import RefitProbe, RolloutCheck
from tepo_nemo.training.settings import TrainerSettings
from tepo_nemo.training.timers import PhaseTimers
from tepo_nemo.training.trainer import Trainer


def prompts_at_once(config: Config, samples: int) -> int | None:
    """Prompts that all copies of the model together answer in one batch; None for any number."""
    batch_size = config.rollout.batch_size
    return None if batch_size is None else max(1, batch_size * config.layout.data // samples)


def make_grader(config: Config, policy: MegatronPolicy, detokenize: Callable[[Sequence[int]], str]) -> Grader:
    """The grader of a configuration; its processes, if it needs any, start on the main rank alone."""
    grading = config.data.grading
    settings = PoolSettings(
        workers=grading.workers,
        time_limit_s=grading.time_limit,
        memory_limit_gib=grading.memory_limit_gib,
        max_tasks=grading.max_tasks,
        response_tail=grading.response_tail,
        alarm_fraction=grading.alarm_fraction,
    )
    return Grader(policy, open_reward(config.data.reward_parts, settings), detokenize)


def make_recorder(
    config: Config, directory: RunDirectory, console: TextIO, after: int, vocab_size: int
) -> RunRecorder:
    """The main rank's recorder, of a run that goes on after step `after`."""
    return RunRecorder(
        directory,
        max_steps=config.trainer.max_steps,
        log_samples=config.trainer.log_samples,
        dump_rollouts=config.trainer.dump_rollouts,
        about=about_run(config, vocab_size),
        trackers=openers(config.trainer.trackers, directory, flat(config), after),
        console=console,
        after=after,
    )


def make_rollout_check(config: Config) -> RolloutCheck:
    """When and how strictly the rollouts of a configuration are held against the policy.

    A replay may start from other weights than those that made its rollouts: it is measured alone.
    """
    check = config.rollout.check
    limits = check.model_dump(exclude={"interval"})
    if config.replay is not None:
        limits = dict.fromkeys(limits, math.inf)
    return RolloutCheck(
        check.interval,
        GapLimits(**limits),
        engine=f"rollout.backend={config.rollout.backend}",
        temperature=config.rollout.temperature,
    )


def make_refit_probe(config: Config, prompts: list[TokenizedPrompt]) -> RefitProbe | None:
    """None for the embedded engine, whose weights are the training weights."""
    if config.rollout.backend == "megatron":
        return None
    return RefitProbe(
        prompts,
        seed=config.seed,
        temperature=config.rollout.temperature,
        max_response_length=config.rollout.max_response_length,
        engine=f"rollout.backend={config.rollout.backend}",
    )


def make_trainer(
    config: Config,
    policy: MegatronPolicy,
    objective: Objective,
    grader: Grader,
    prompts: list[TokenizedPrompt],
    evaluate_all: Callable[[], dict[str, float]],
    recorder: Recorder,
    saver: Saver,
    check_stop: Callable[[], None],
    go_back: Callable[[], dict[str, Any] | None],
    replay: Replay | None,
) -> Trainer:
    """The trainer of a configuration, at the first step of a replay if it is one."""
    timers = PhaseTimers(torch.cuda.synchronize)
    settings = TrainerSettings(
        seed=config.seed,
        max_steps=config.trainer.max_steps,
        prompts_per_step=config.rollout.prompts_per_step,
        responses_per_prompt=config.rollout.responses_per_prompt,
        updates_per_rollout=config.trainer.updates_per_rollout,
        micro_batch_size=config.trainer.micro_batch_size,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        sequence_packing=config.trainer.sequence_packing,
        max_response_length=config.rollout.max_response_length,
        advantage=config.algorithm.advantage,
        overlong_fraction=config.algorithm.overlong_fraction,
        learning_rate=config.trainer.optimizer.learning_rate,
        warmup_steps=config.trainer.warmup_steps,
        save_interval=config.trainer.save_interval,
        eval_interval=config.data.eval_interval,
        max_bad_updates=config.trainer.max_bad_updates,
        spike_factor=config.trainer.spike_factor,
        spike_window=config.trainer.spike_window,
        spike_rewinds=config.trainer.spike_rewinds,
    )
    collector = (
        RolloutReader(replay.folders, timers)
        if replay is not None
        else StepCollector(
            policy,
            grader,
            prompts,
            PromptOrder(len(prompts), config.seed),
            timers,
            check_stop,
            seed=config.seed,
            prompts_per_step=settings.prompts_per_step,
            responses_per_prompt=settings.responses_per_prompt,
            temperature=config.rollout.temperature,
            max_response_length=settings.max_response_length,
            prompts_at_once=prompts_at_once(config, config.rollout.responses_per_prompt),
            dynamic_sampling=config.algorithm.dynamic_sampling,
            max_generation_batches=config.algorithm.max_generation_batches,
        )
    )
    trainer = Trainer(
        settings,
        policy,
        objective,
        collector,
        timers,
        recorder,
        make_rollout_check(config),
        make_refit_probe(config, prompts),
        evaluate=lambda: {f"{EVALUATION_PREFIX}{name}": score for name, score in evaluate_all().items()},
        saver=saver,
        check_stop=check_stop,
        go_back=go_back,
    )
    if replay is not None:
        trainer.step = replay.first - 1
    return trainer
