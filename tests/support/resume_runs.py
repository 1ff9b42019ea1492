"""Small whole runs on the real host that are stopped and gone on with. Run in all ranks of a layout."""

import gc
import io
import json
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple
from unittest.mock import patch

from support.gather import Part, own_weights
from support.toy import CHARACTERS, ToyFolder

from tepo_nemo.config.load import dump_config
from tepo_nemo.config.schema import Config
from tepo_nemo.reward.result import RewardResult, in_process
from tepo_nemo.runs.checkpoints import CheckpointFolder
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.stop import StopFlag, Stopped

PROMPTS = 10  # four a step: an epoch ends inside the third step, the next one at the end of the fifth


@in_process
def some_digit(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """Right where the gold digit is in the response: weights without any training manage now and then."""
    return RewardResult(float(gold in response_text), "ok", response_text[:1])


def make_prompts(path: Path) -> None:
    """A prompt set."""
    rows = [
        {"id": f"p{number}", "prompt": f"{CHARACTERS[number]}+{number}=", "gold": str(number)}
        for number in range(PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def resume_config(toy: ToyFolder, output: Path, *overrides: str, **layout: int) -> Config:
    """Five steps of two updates on four prompts, a checkpoint a step, all of them kept."""
    prompts = toy.path / "resume.jsonl"
    if not prompts.exists():
        make_prompts(prompts)
    return toy.config(
        f"output={output}",
        f"data.train={prompts}",
        "data.reward=support.resume_runs.some_digit",
        "rollout.prompts_per_step=4",
        "rollout.responses_per_prompt=4",
        "rollout.batch_size=8",
        "rollout.max_response_length=6",
        "trainer.max_steps=5",
        "trainer.updates_per_rollout=2",
        "trainer.optimizer.learning_rate=1e-3",
        "trainer.warmup_steps=3",
        "trainer.save_interval=1",
        "trainer.keep_last=100",
        *overrides,
        **layout,
    )


class StopAt(NamedTuple):
    """Where a process is to stop: when it looks for the `count`-th time in this phase, counted from 1."""

    phase: Literal["rollout", "update", "evaluation"]
    count: int


_FUNCTIONS = {"rollout": "collect", "update": "_update", "evaluation": "evaluate"}


class PlannedStop(StopFlag):
    """Asks to stop at one place."""

    def __init__(self, at: StopAt | None) -> None:
        super().__init__()
        self._at = at
        self._left = 0 if at is None else at.count

    @property
    def value(self) -> int:
        if self._at is None:
            return 0
        callers = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
        self._left -= _FUNCTIONS[self._at.phase] in callers
        return self.REASONS.index("SIGTERM") if self._left <= 0 else 0


@dataclass(frozen=True)
class Ended:
    """How a rank's run has ended."""

    stopped: bool
    console: str  # of the main rank
    weights: Part


@dataclass(frozen=True)
class Fault:
    """What goes wrong with saving in a process."""

    failing_rank: int | None = None  # whose files cannot be written
    unaware: bool = False  # that there is little room is seen when it is too late

    @contextmanager
    def injected(self, rank: int) -> Iterator[None]:
        from tepo_nemo.nemo import saver

        def fail(save: saver.ShardedSave) -> None:
            raise OSError(5, "Input/output error")

        with ExitStack() as patches:
            if rank == self.failing_rank:
                patches.enter_context(patch.object(saver.ShardedSave, "write", fail))
            if self.unaware:
                room = SimpleNamespace(free=1 << 60)
                patches.enter_context(patch.object(saver.shutil, "disk_usage", lambda path: room))
            yield


def run_here(
    rank: int, world_size: int, config: Config, stop_at: StopAt | None = None, fault: Fault | None = None
) -> Ended:
    """Start or go on with a run; it may be stopped at one place."""
    with nullcontext() if fault is None else fault.injected(rank):
        return train_here(rank, config, PlannedStop(stop_at))


def train_here(rank: int, config: Config, stop: StopFlag) -> Ended:
    """What `launch` does in each rank, and in the parent."""
    gc.freeze()  # a rank starts with the launcher's million objects
    from tepo_nemo.nemo import run

    if rank == 0:
        directory = RunDirectory(config.output)
        (RunDirectory.reopen if directory.exists else RunDirectory.create)(config.output, dump_config(config))
    console, hosts, build = io.StringIO(), [], run.build_host
    with patch.object(run, "build_host", lambda config: hosts.append(build(config)) or hosts[-1]):
        try:
            run.train(config, console, stop)
            stopped = False
        except Stopped:
            stopped = True
    return Ended(stopped, console.getvalue(), own_weights(hosts[0]))


def told(output: Path) -> list[str]:
    """Every digit of the metrics, seconds apart; as text, in which NaN equals NaN."""
    rows = [json.loads(line) for line in RunDirectory(output).metrics.read_text().splitlines()]
    return [repr({key: value for key, value in row.items() if not key.startswith("time/")}) for row in rows]


def samples(output: Path) -> dict[str, str]:
    """Of every step."""
    return {path.name: path.read_text() for path in sorted(RunDirectory(output).samples_folder.iterdir())}


def written(output: Path) -> dict[str, str]:
    """Hashes of the weights, the optimizer and the generators in the last checkpoint.

    `.metadata` of PyTorch has a random number in it.
    """
    folder = CheckpointFolder(RunDirectory(output).checkpoints)
    (manifest, *_) = folder.complete().values()
    return {
        name: record.sha256
        for name, record in manifest.files.items()
        if name.endswith((".distcp", ".safetensors"))
    }
