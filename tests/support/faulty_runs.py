"""Small whole runs on the real host in which something breaks on one rank. Run in all ranks of a layout."""

import io
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.gather import Part, own_weights
from support.toy import CHARACTERS, ToyFolder

from tepo_nemo.config.load import dump_config
from tepo_nemo.config.schema import Config
from tepo_nemo.reward.result import RewardResult, in_process
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.stop import StopFlag

BROKEN_RANK = 1
TIMEOUT_MINUTES = 2.5
BROKEN_UPDATE = 2  # of the run; its steps have two each


@in_process
def digit_or_nan(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """Right where the gold digit is in the response; not a number, as a broken reward, for some responses."""
    value = math.nan if response_text.startswith(("1", "2")) else float(gold in response_text)
    return RewardResult(value, "ok")


def faulty_config(toy: ToyFolder, output: Path, *overrides: str, **layout: int) -> Config:
    """Two steps of two updates on four prompts."""
    prompts = toy.path / "faulty.jsonl"
    if not prompts.exists():
        rows = [
            {"id": f"p{number}", "prompt": f"{CHARACTERS[number]}+{number}=", "gold": str(number)}
            for number in range(8)
        ]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return toy.config(
        f"output={output}",
        f"data.train={prompts}",
        "data.reward=support.faulty_runs.digit_or_nan",
        "rollout.prompts_per_step=4",
        "rollout.responses_per_prompt=4",
        "rollout.max_response_length=6",
        "algorithm.dynamic_sampling=false",
        "trainer.max_steps=2",
        "trainer.updates_per_rollout=2",
        "trainer.optimizer.learning_rate=1e-3",
        f"trainer.collective_timeout={TIMEOUT_MINUTES}",
        *overrides,
        **layout,
    )


@dataclass(frozen=True)
class Outcome:
    """What one rank has of a run."""

    weights: Part | None
    error: str | None
    console: str
    timeouts: set[timedelta]  # of every process group but those of experts, which no model here has


def run_all(rank: int, world_size: int, jobs: list[tuple[str | None, Config]]) -> list[Outcome]:
    """One run after the other; each job is what breaks in it (a key of `FAULTS`) and its configuration."""
    import gc

    gc.freeze()
    return [_run(fault, config) for fault, config in jobs]


def _run(fault: str | None, config: Config) -> Outcome:
    import torch.distributed as dist

    from tepo_nemo.nemo import run

    if int(os.environ["RANK"]) == 0:
        RunDirectory.create(config.output, dump_config(config))
    if dist.is_initialized():
        dist.barrier()
    console, hosts = io.StringIO(), []
    build = run.build_host

    def building(config: Config) -> Any:
        hosts.append(build(config))
        return hosts[-1]

    with patch.object(run, "build_host", building), FAULTS[fault]():
        try:
            run.train(config, console, StopFlag())
        except (RuntimeError, FloatingPointError) as error:
            return Outcome(None, f"{type(error).__name__}: {error}", console.getvalue(), _timeouts())
    return Outcome(own_weights(hosts[0]), None, console.getvalue(), _timeouts())


def _timeouts() -> set[timedelta]:
    import torch
    from torch.distributed import distributed_c10d

    groups = [group for group in distributed_c10d._world.pg_map if not group.group_desc.startswith("EXPERT_")]
    assert any(group.group_desc == "DATA_PARALLEL_GROUP" for group in groups), "Megatron's are among them"
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def rows_of(output: Path) -> list[dict[str, float]]:
    """What is told of each step, but for seconds."""
    rows = [json.loads(line) for line in RunDirectory(output).metrics.read_text().splitlines()]
    return [{key: row[key] for key in row if not key.startswith("time/")} for row in rows]


# --- what breaks ---------------------------------------------------------------------------------


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _on_the_broken_rank(name: str, breaks: Callable[[Any], None], *, call: int | None) -> Any:
    """Wrap a method of the actor: after its `call`-th call (None: after each) on one rank, it breaks."""

    @contextmanager
    def wrapped() -> Iterator[None]:
        from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel as Actor

        method, calls = getattr(Actor, name), 0

        def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            result = method(self, *args, **kwargs)
            if call in (None, calls) and int(os.environ["RANK"]) == BROKEN_RANK:
                replaced = breaks(self, result)
                result = result if replaced is None else replaced
            return result

        with patch.object(Actor, name, broken):
            yield

    return wrapped


def _nan_gradient(actor: Any, result: Any) -> None:
    """Of all weights that no tensor-parallel rank has too; the optimizer may take a part of it."""
    for name, parameter in actor.get_model_module_list()[0].named_parameters():
        if "linear" in name:
            _gradient_of(parameter).fill_(math.nan)


def _infinite_gradient_of_a_norm(actor: Any, result: Any) -> None:
    """A weight that other tensor-parallel ranks have too, and that no norm counts twice."""
    named = actor.get_model_module_list()[0].named_parameters()
    _gradient_of(next(parameter for name, parameter in named if "norm" in name))[0] = math.inf


def _gradient_of(parameter: Any) -> Any:
    """Where the host has it: the distributed optimizer adds up in a buffer of its own."""
    return getattr(parameter, "main_grad", parameter.grad)


def _nan_loss(actor: Any, result: Any) -> Any:
    """What is told of the loss alone; the gradient is sound."""
    loss, metrics = result
    return None if loss is None else (loss * math.nan, metrics)


def _nan_values(actor: Any, result: Any) -> Any:
    """One log-prob of a forward pass."""
    logprobs, entropy = result
    poison = logprobs.new_zeros(logprobs.shape)
    poison[0] = math.nan
    return logprobs + poison, entropy


def _nan_weights(actor: Any, result: Any) -> None:
    """Before a rollout."""
    next(iter(actor.get_model_module_list()[0].parameters())).data.view(-1)[:64] = math.nan


@contextmanager
def _spike() -> Iterator[None]:
    """The gradient of the fifth update is a thousand times what it is, on all ranks."""
    from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel as Actor

    finish, calls = Actor.finish_training_step, 0

    def spiking(self: Any) -> None:
        nonlocal calls
        calls += 1
        finish(self)
        if calls == 5:
            for parameter in self.get_model_module_list()[0].parameters():
                _gradient_of(parameter).mul_(1000)

    with patch.object(Actor, "finish_training_step", spiking):
        yield


@contextmanager
def _nan_logits() -> Iterator[None]:
    """The hidden states of one training forward, from which the logits are made."""
    from tepo_nemo.nemo.actor import MegatronGPTTEPOActorModel as Actor

    take, compute, state = Actor.get_loss_and_metrics, Actor._logprobs_and_entropy, {"update": 0, "left": 0}

    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        state["update"] += 1
        state["left"] = int(state["update"] == BROKEN_UPDATE and int(os.environ["RANK"]) == BROKEN_RANK)
        return take(self, *args, **kwargs)

    def computing(self: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        if state["left"]:
            state["left"] = 0
            hidden = hidden * math.nan
        return compute(self, hidden, *args, **kwargs)

    with (
        patch.object(Actor, "get_loss_and_metrics", taking),
        patch.object(Actor, "_logprobs_and_entropy", computing),
    ):
        yield


FAULTS: dict[str | None, Any] = {
    None: _nothing,
    "loss": _on_the_broken_rank("get_loss_and_metrics", _nan_loss, call=BROKEN_UPDATE),
    "gradient": _on_the_broken_rank("finish_training_step", _nan_gradient, call=BROKEN_UPDATE),
    "copied gradient": _on_the_broken_rank(
        "finish_training_step", _infinite_gradient_of_a_norm, call=BROKEN_UPDATE
    ),
    "logits": _nan_logits,
    "every gradient": _on_the_broken_rank("finish_training_step", _nan_gradient, call=None),
    "spike": _spike,
    "weights": _on_the_broken_rank("prepare_for_inference", _nan_weights, call=2),
}
