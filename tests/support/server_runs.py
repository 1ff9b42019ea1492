"""Whole small runs that learn in a few steps, with whatever generates. Run in all ranks of a layout."""

import io
import json
from dataclasses import dataclass
from pathlib import Path

from support.toy import ToyFolder

from tepo_nemo.config.load import dump_config
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError
from tepo_nemo.rollout.protocol import RolloutError
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.stop import StopFlag

STEPS, RESPONSES = 6, 12 * 16


def learning_config(toy: ToyFolder, output: Path, *overrides: str, **layout: int) -> Config:
    """Six steps of 192 responses, from random weights to responses that hold a seven."""
    return toy.config(
        f"output={output}",
        "data.reward=support.trtllm_runs.holds_a_seven",
        "algorithm.dynamic_sampling=false",
        "rollout.responses_per_prompt=16",
        "rollout.max_response_length=8",
        f"trainer.max_steps={STEPS}",
        "trainer.updates_per_rollout=4",
        "trainer.micro_batch_size=null",
        "trainer.optimizer.learning_rate=1e-2",
        *overrides,
        **layout,
    )


@dataclass(frozen=True)
class Learned:
    """What a run wrote down, and how it ended."""

    rewards: list[float]  # of each step
    gaps: list[float]  # mean absolute difference between log-probs of what generated and the trainer
    error: str | None


def learn(rank: int, world_size: int, config: Config) -> Learned:
    """Train as `launch.rank` does."""
    import gc

    gc.freeze()
    from tepo_nemo.nemo.run import train

    directory = RunDirectory(config.output)
    if rank == 0:
        RunDirectory.create(config.output, dump_config(config))
    error = None
    try:
        train(config, io.StringIO(), StopFlag())
    except (RolloutError, UserError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    lines = directory.metrics.read_text().splitlines() if directory.metrics.exists() else []
    rows = [json.loads(line) for line in lines]
    return Learned(
        [row["reward/mean"] for row in rows], [row["rollout/logprob_gap_mean"] for row in rows], error
    )


def assert_alike(rewards: list[float], others: list[float]) -> None:
    """Both runs learn the task; their first and last steps differ by the noise of the samples alone."""
    assert rewards[0] < 0.7 and min(rewards[-1], others[-1]) > 0.9, (rewards, others)
    for reward, other in ((rewards[0], others[0]), (rewards[-1], others[-1])):
        p = (reward + other) / 2
        assert abs(reward - other) <= 4 * (2 * p * (1 - p) / RESPONSES) ** 0.5, (rewards, others)
