"""The step of this package's trainer on a workload."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state

from tepo_nemo.bench.generation import GenerationSpeed, compare_generation
from tepo_nemo.bench.step.levers import Variant, longest_sequence
from tepo_nemo.bench.step.taken import Taken
from tepo_nemo.bench.step.workload import Workload
from tepo_nemo.config.load import dump_config
from tepo_nemo.config.schema import Config
from tepo_nemo.nemo.assembly import make_recorder, make_trainer
from tepo_nemo.nemo.build import Host
from tepo_nemo.nemo.policy import MegatronPolicy
from tepo_nemo.nemo.prompts import load_tokenized
from tepo_nemo.nemo.rollout.megatron import MegatronRollout
from tepo_nemo.nemo.run import connect_policy
from tepo_nemo.objectives import registry
from tepo_nemo.reward.result import RewardFunction, RewardResult
from tepo_nemo.rollout.batch import TokenizedPrompt
from tepo_nemo.rollout.protocol import Generation, GenerationRequest, RolloutBackend
from tepo_nemo.rollout.sampling import prompt_key
from tepo_nemo.rollout.scoring import Grader
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.stop import StopFlag
from tepo_nemo.training.protocols import Recorder
from tepo_nemo.training.recorder import SilentRecorder
from tepo_nemo.training.stopping import StopCheck


class OurStep:
    """Takes steps of `training.trainer.Trainer` as `tepo-nemo train` does, with all that it writes down.

    Args:
        host: of the workload's model; others may use it between the steps.
        output: a new run directory.
    """

    def __init__(self, host: Host, workload: Workload, variant: Variant, folder: Path, output: Path) -> None:
        self.actor, self.optimizer = host.actor, host.optimizer
        self._host, self._workload, self._variant = host, workload, variant
        config = self._config = workload.config(folder, f"output={output}", *variant.overrides)
        self._objective = registry.build(config.algorithm.name, config.algorithm.options)
        prompts = _load_prompts(host, workload, config)
        self._backend = _LimitedRollout(
            MegatronRollout(
                host.actor,
                stop_token=workload.unused_token,
                vocab_size=config.model.vocab_size,
                batch_size=config.rollout.batch_size,
            ),
            {
                prompt_key(prompt.prompt.id): limits
                for prompt, limits in zip(prompts, workload.limits, strict=True)
            },
            to_longest=variant.run_to_longest,
        )
        policy = self._connect()
        if variant.pad_to_longest:
            policy.length_multiple = longest_sequence(workload)
        if policy.is_main:
            directory = RunDirectory.create(config.output, dump_config(config))
            self._recorder = _LastStep(
                make_recorder(config, directory, open(os.devnull, "w"), 0, self._host.actor.true_vocab_size)
            )
        else:
            self._recorder = _LastStep(SilentRecorder())
        grader = Grader(policy, _reward_after(variant.grading_s), host.actor.tokenizer.ids_to_text)
        self._trainer = make_trainer(
            config,
            policy,
            self._objective,
            grader,
            prompts,
            dict,
            self._recorder,
            _NoSaver(),
            StopCheck(StopFlag(), policy.max_over_ranks, lambda: None),
            go_back=lambda: None,
            replay=None,
        )

    def _connect(self) -> MegatronPolicy:
        policy = connect_policy(self._host, self._config, self._objective)
        self._host.actor.rollout = self._backend
        return policy

    def __call__(self) -> Taken:
        self._connect()  # another one may have used the model meanwhile
        self._trainer.load_state_dict(self._trainer.state_dict() | {"step": 0})
        with self._variant.plain():
            self._trainer.fit()
        metrics = self._recorder.metrics
        return Taken(
            generation=metrics["time/rollout_s"],
            statistics=metrics["time/old_stats_s"],
            training=metrics["time/train_s"],
            trained_tokens=metrics["tokens/trained"],
        )


def compare_generation_alone(host: Host, workload: Workload, folder: Path, pairs: int) -> GenerationSpeed:
    """Ours and NeMo's, greedily and at the same limits, all responses of a step at once."""
    config = workload.config(folder)
    connect_policy(host, config, registry.build(config.algorithm.name, config.algorithm.options))
    prompts = [prompt.tokens for prompt in _load_prompts(host, workload, config)]
    with _silent_stop_token(host):
        return compare_generation(
            host.actor,
            [prompt for prompt in prompts for _ in range(workload.responses_per_prompt)],
            [limit for limits in workload.limits for limit in limits],
            pairs=pairs,
        )


@contextmanager
def _silent_stop_token(host: Host) -> Iterator[None]:
    """Give the stop token the logit 0, which is never the largest: the limits alone end a response."""
    weight = host.actor.get_model_module_list()[-1].output_layer.weight
    row = host.actor.tokenizer.eos_id - parallel_state.get_tensor_model_parallel_rank() * len(weight)
    if not 0 <= row < len(weight):
        yield
        return
    kept = weight[row].detach().clone()
    with torch.no_grad():
        weight[row] = 0
        yield
        weight[row] = kept


def _load_prompts(host: Host, workload: Workload, config: Config) -> list[TokenizedPrompt]:
    return load_tokenized(
        config.data.train,
        host.actor.tokenizer,
        key="data.train",
        max_response_length=workload.longest,
        sequence_length=config.model.encoder_seq_length,
    )


class _NoSaver:
    """Saving is no part of a step."""

    failed = 0

    def save(self, *_: object, **__: object) -> None:
        """Nothing."""

    def has(self, step: int) -> bool:
        return True

    def poll(self) -> None:
        """Nothing is on its way."""


class _LastStep:
    """A recorder that passes everything on and remembers the metrics of the last step."""

    def __init__(self, inner: Recorder) -> None:
        self._inner = inner
        self.metrics: dict[str, float] = {}

    def step(self, step, metrics, kept, advantages) -> None:
        self.metrics = metrics
        self._inner.step(step, metrics, kept, advantages)

    def rollout(self, step, collected) -> None:
        self._inner.rollout(step, collected)

    def bad_update(self, step, update, why, collected) -> None:
        self._inner.bad_update(step, update, why, collected)

    def go_back(self, step) -> None:
        self._inner.go_back(step)

    def message(self, text: str) -> None:
        self._inner.message(text)

    def flush(self) -> None:
        self._inner.flush()


class _LimitedRollout:
    """A rollout backend with a length for each response, by the key of its prompt and its number.

    Args:
        to_longest: generate every response up to the longest one's length, and cut it then.
    """

    def __init__(self, inner: RolloutBackend, limits: dict[int, list[int]], *, to_longest: bool) -> None:
        self.takes_all_rows = inner.takes_all_rows
        self._inner = inner
        self._limits = limits
        self._to_longest = to_longest

    def prepare(self) -> None:
        self._inner.prepare()

    def generate(self, request: GenerationRequest) -> Generation:
        rows = zip(request.prompt_keys, request.sample_indices, strict=True)
        limits = [self._limits[key][sample] for key, sample in rows]
        if not self._to_longest:
            return self._inner.generate(replace(request, max_response_lengths=limits))
        longest = max(max(of_prompt) for of_prompt in self._limits.values())
        generation = self._inner.generate(replace(request, max_response_lengths=[longest] * len(limits)))
        return replace(generation, lengths=torch.tensor(limits))

    def release(self) -> None:
        self._inner.release()


def _reward_after(seconds: float) -> RewardFunction:
    """A reward of 1 where the characters add up to an odd number, that keeps its caller waiting."""

    def reward(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
        time.sleep(seconds)
        return RewardResult(float(sum(map(ord, response_text)) % 2), "ok")

    return reward
