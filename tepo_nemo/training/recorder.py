"""Writes a run down: metrics, samples, TensorBoard events and the console line of a step."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TextIO

from torch import Tensor

from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.runs.console import Console
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import MetricsWriter
from tepo_nemo.runs.samples import Sample, write_samples
from tepo_nemo.runs.trackers import Tracker, Trackers
from tepo_nemo.training.collect import CollectedStep
from tepo_nemo.training.dumps import RolloutDumps


class RecordError(OSError):
    """Steps of the run are missing in its metrics file at the end."""


class RunRecorder:
    """The recorder of the main rank. It writes in a thread of its own while training goes on.

    Metrics are the run's own record: a step that cannot be written (a full disk) waits for the next one, and
    at the end of the run none may be missing. Samples and dumps of rollouts are told to be missing, and
    trackers are switched off.

    Args:
        directory: of the run, made already.
        max_steps: for the console.
        log_samples: responses written down a step.
        dump_rollouts: steps between two dumps of a rollout; 0 is none.
        about: JSON that a dump says of the run.
        trackers: what opens each tracker, by its name.
        console: where a person reads.
        after: the run goes on after this step; what an earlier process has written of later ones is dropped.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        max_steps: int,
        log_samples: int,
        dump_rollouts: int,
        about: Mapping[str, Any],
        trackers: Mapping[str, Callable[[], Tracker]],
        console: TextIO,
        after: int = 0,
    ) -> None:
        self._directory = directory
        self._metrics = MetricsWriter(directory.metrics)
        self.rewards: list[float] = []
        self._keep_until(after)
        self._console = Console(max_steps, console)
        self._trackers = Trackers(trackers, self.message)
        self._dumps = RolloutDumps(directory, every=dump_rollouts, about=about, report=self.message)
        self._log_samples = log_samples
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="recorder")
        self._writing: Future[None] | None = None
        self._unwritten: deque[tuple[int, dict[str, float]]] = deque()

    def step(
        self, step: int, metrics: dict[str, float], kept: ScoredBatch | None, advantages: Tensor | None
    ) -> None:
        self.flush()
        self.rewards.append(metrics["reward/mean"])
        self._writing = self._thread.submit(self._write, step, metrics, kept, advantages)

    def _write(
        self, step: int, metrics: dict[str, float], kept: ScoredBatch | None, advantages: Tensor | None
    ) -> None:
        self._unwritten.append((step, metrics))
        if (error := self._write_metrics()) is not None:
            self.message(f"{self._directory.metrics} cannot be written ({error}): the next step tries again")
        self._trackers.add(step, metrics)
        self._console.step_line(metrics)
        if kept is None or advantages is None:
            return
        try:
            write_samples(self._directory.samples(step), samples_of(kept, advantages, self._log_samples))
        except OSError as error:
            self.message(f"{self._directory.samples(step)} could not be written: {error.strerror}")

    def _write_metrics(self) -> str | None:
        """Write the steps that wait; why not all of them could be."""
        try:
            while self._unwritten:
                self._metrics.write(*self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            return error.strerror
        return None

    def flush(self) -> None:
        """Wait until the steps told are written; raises what writing raised."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def rollout(self, step: int, collected: CollectedStep) -> None:
        self._dumps.rollout(step, collected)

    def bad_update(self, step: int, update: int, why: str, collected: CollectedStep) -> None:
        self.message(f"step {step}, update {update} is skipped: {why}")
        self._dumps.bad_update(step, update, why, collected)

    def go_back(self, step: int) -> None:
        self.flush()
        self._keep_until(step)

    def _keep_until(self, step: int) -> None:
        self.rewards = [row["reward/mean"] for row in self._metrics.keep_until(step)]
        self._directory.drop_samples(step)

    def evaluation(self, when: str, scores: dict[str, float]) -> None:
        """Tell the scores of the run's start or end."""
        self.flush()
        self.message(f"{when}  " + "  ".join(f"{name} {score:.3f}" for name, score in scores.items()))

    def message(self, text: str) -> None:
        """Tell a person a line."""
        self._console.message(text)

    def close(self) -> None:
        """Take the progress bar away and close the files. Raises RecordError where steps are missing."""
        try:
            self.flush()
            if (error := self._write_metrics()) is not None:
                steps = ", ".join(str(step) for step, _ in self._unwritten)
                raise RecordError(f"{self._directory.metrics} lacks step {steps}: {error}")
        finally:
            self._thread.shutdown()
            self._trackers.close()
            self._console.close()


class SilentRecorder:
    """The recorder of all other ranks: the main rank writes."""

    rewards: Sequence[float] = ()

    def step(
        self, step: int, metrics: dict[str, float], kept: ScoredBatch | None, advantages: Tensor | None
    ) -> None:
        """Nothing."""

    def rollout(self, step: int, collected: CollectedStep) -> None:
        """Nothing."""

    def bad_update(self, step: int, update: int, why: str, collected: CollectedStep) -> None:
        """Nothing."""

    def go_back(self, step: int) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    def evaluation(self, when: str, scores: dict[str, float]) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing is open."""


def samples_of(scored: ScoredBatch, advantages: Tensor, count: int) -> list[Sample]:
    """The first `count` responses as rows of a samples file."""
    rollouts = scored.rollouts
    rows = []
    for row in range(min(count, len(rollouts))):
        prompt = rollouts.prompts[int(rollouts.groups[row])].prompt
        result = scored.results[row]
        rows.append(
            Sample(
                prompt_id=prompt.id,
                prompt=prompt.prompt,
                response=scored.texts[row],
                gold=prompt.gold,
                extracted=result.extracted,
                verdict=result.status,
                reward=result.value,
                advantage=float(advantages[row]),
                length=int(rollouts.generation.lengths[row]),
                truncated=not bool(rollouts.generation.finished[row]),
            )
        )
    return rows
