"""A run that is killed, or asked to stop, at random moments until it is done; what must hold each time."""

import mmap
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from support.resume_runs import Ended, resume_config, told, train_here, written
from support.toy import ToyFolder
from support.worlds import World, Worlds

from tepo_nemo.config.schema import Config
from tepo_nemo.runs.checkpoints import (
    CheckpointFolder,
    Position,
    check_files,
    check_hashes,
    read_manifest,
)
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.stop import StopFlag

PHASES = ("starting", "rollout", "updates", "evaluation", "saving", "between")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def killable_config(toy: ToyFolder, output: Path, steps: int, **layout: int) -> Config:
    """A checkpoint a step, the last two of which are kept; an evaluation every other step."""
    return resume_config(
        toy,
        output,
        f"trainer.max_steps={steps}",
        "trainer.keep_last=2",
        "rollout.batch_size=4",
        "data.eval_interval=2",
        f"data.evaluation=[{{name: e, path: {toy.path / 'resume.jsonl'}, samples: 2, temperature: 1.0}}]",
        **layout,
    )


_NOT_YET = 255


def train_watched(rank: int, world_size: int, config: Config, phase_file: Path) -> Ended:
    """A run whose ranks write down what they are at, so that it is known when they are killed."""
    stop = StopFlag()
    stop.listen()
    with _phases(_of_rank(phase_file, rank)):
        return train_here(rank, config, stop)


def _of_rank(phase_file: Path, rank: int) -> Path:
    return phase_file.with_suffix(f".{rank}")


@contextmanager
def _phases(path: Path) -> Iterator[None]:
    """One byte in memory that the kernel writes to the file, whatever becomes of this process."""
    from tepo_nemo.nemo import run
    from tepo_nemo.nemo.saver import CheckpointSaver
    from tepo_nemo.training.collect import StepCollector
    from tepo_nemo.training.trainer import Trainer

    with open(path, "rb+") as file:
        byte = mmap.mmap(file.fileno(), 1)
    byte[0] = PHASES.index("starting")

    def marked(owner: object, name: str, phase: str):
        plain = getattr(owner, name)

        def call(*args, **kwargs):
            before, byte[0] = byte[0], PHASES.index(phase)
            result = plain(*args, **kwargs)
            byte[0] = before
            return result

        return patch.object(owner, name, call)

    with (
        marked(Trainer, "fit", "between"),
        marked(StepCollector, "collect", "rollout"),
        marked(Trainer, "_update", "updates"),
        marked(CheckpointSaver, "save", "saving"),
        marked(run, "evaluate", "evaluation"),
    ):
        yield


@dataclass
class Tally:
    """What a series of kills has come to."""

    kills: Counter = field(default_factory=Counter)  # phase -> SIGKILLs
    stops: Counter = field(default_factory=Counter)  # (signal, phase) -> stops with the state saved
    slowest_stop_s: float = 0.0
    processes: int = 0

    @property
    def total(self) -> int:
        return self.kills.total() + self.stops.total()


class Harrier:
    """Starts a run over and over, and ends it after a random time."""

    def __init__(self, worlds: Worlds, config: Config, seed: int) -> None:
        self._world: World = worlds(config.layout.world, stack="nemo")
        self._config = config
        self._random = random.Random(seed)
        self._folder = CheckpointFolder(RunDirectory(config.output).checkpoints)
        self._phase_file = config.output.parent / "phase"
        self._newest: Position | None = None
        self.tally = Tally()

    def harry(self, count: int, *, signals: bool, longest_s: float) -> list[Ended]:
        """Kill or stop it `count` times, each within `longest_s` of its start; then let it end.

        Asserts after each that no complete checkpoint is lost and none is broken.
        """
        while self.tally.total < count:
            number = self._random.choice((signal.SIGKILL, *SIGNALS) if signals else (signal.SIGKILL,))
            ended = self._run(number, self._random.uniform(0.0, longest_s))
            if ended is not None:
                return ended
            self._look()
        return self._run(None, 0.0)

    def _run(self, number: signal.Signals | None, after_s: float) -> list[Ended] | None:
        """One process a rank; None where it was ended early."""
        self.tally.processes += 1
        for rank in range(self._world.size):
            _of_rank(self._phase_file, rank).write_bytes(bytes([_NOT_YET]))
        answers: list[list[Ended] | BaseException] = []

        def body() -> None:
            try:
                answers.append(self._world.run(train_watched, self._config, self._phase_file, timeout=600))
            except BaseException as error:
                answers.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        if number is not None:
            self._end(thread, number, after_s)
        thread.join()
        (answer,) = answers
        if isinstance(answer, BaseException):
            assert number == signal.SIGKILL and "died" in str(answer), answer
            return None
        if any(of_rank.stopped for of_rank in answer):
            assert all(of_rank.stopped for of_rank in answer)
            return None
        return answer

    def _end(self, thread: threading.Thread, number: signal.Signals, after_s: float) -> None:
        while self._world._ranks is None and thread.is_alive():
            time.sleep(0.001)
        if number != signal.SIGKILL:  # as a Python program before its first line, a rank dies of others too
            while _NOT_YET in self._phases_now() and thread.is_alive():
                time.sleep(0.001)
        thread.join(after_s)
        if not thread.is_alive():
            return  # it was done before
        ranks = self._world._ranks
        for pid in ranks.pids if ranks is not None else ():
            os.killpg(pid, number)
        phase = PHASES[self._phases_now()[0] % _NOT_YET]
        if number == signal.SIGKILL:
            self.tally.kills[phase] += 1
            return
        asked = time.monotonic()
        thread.join()
        self.tally.stops[number.name, phase] += 1
        self.tally.slowest_stop_s = max(self.tally.slowest_stop_s, time.monotonic() - asked)

    def _phases_now(self) -> list[int]:
        return [_of_rank(self._phase_file, rank).read_bytes()[0] for rank in range(self._world.size)]

    def _look(self) -> None:
        complete = self._folder.complete()
        for position, manifest in complete.items():
            path = self._folder.of(position)
            assert read_manifest(path) == manifest
            check_files(path, manifest)
            check_hashes(path, manifest, list(manifest.files))
        named = self._folder.positions()
        assert named == list(complete), f"under their own names they are complete: {named}, {list(complete)}"
        newest = next(iter(complete), None)
        if self._newest is not None:
            assert newest is not None and newest >= self._newest, f"{self._newest} is lost: {list(complete)}"
        self._newest = newest


def assert_same_run(config: Config, in_one: Config) -> None:
    """Metrics, weights, optimizer and generators to the bit."""
    assert told(config.output) == told(in_one.output)
    assert written(config.output) == written(in_one.output)
