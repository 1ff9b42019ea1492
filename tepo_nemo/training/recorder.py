"""Writes a run down: metrics, samples, TensorBoard events and the console line of a step."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TextIO

from torch import Tensor

from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.runs.console import Console
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.metrics import MetricsWriter
from tepo_nemo.runs.samples import Sample, write_samples
from tepo_nemo.runs.tensorboard import TensorBoard


class RunRecorder:
    """The recorder of the main rank. It writes in a thread of its own while training goes on.

    Args:
        directory: of the run, made already.
        max_steps: for the console.
        log_samples: responses written down a step.
        console: where a person reads.
        after: the run goes on after this step; what an earlier process has written of later ones is dropped.
    """

    def __init__(
        self, directory: RunDirectory, *, max_steps: int, log_samples: int, console: TextIO, after: int = 0
    ) -> None:
        self._directory = directory
        self._metrics = MetricsWriter(directory.metrics)
        self.rewards: list[float] = [row["reward/mean"] for row in self._metrics.keep_until(after)]
        directory.drop_samples(after)
        self._tensorboard = TensorBoard(directory.tensorboard, after)
        self._console = Console(max_steps, console)
        self._log_samples = log_samples
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="recorder")
        self._writing: Future[None] | None = None

    def step(
        self, step: int, metrics: dict[str, float], kept: ScoredBatch | None, advantages: Tensor | None
    ) -> None:
        self.flush()
        self.rewards.append(metrics["reward/mean"])
        self._writing = self._thread.submit(self._write, step, metrics, kept, advantages)

    def _write(
        self, step: int, metrics: dict[str, float], kept: ScoredBatch | None, advantages: Tensor | None
    ) -> None:
        self._metrics.write(step, metrics)
        self._tensorboard.add(step, metrics)
        self._console.step_line(metrics)
        if kept is not None and advantages is not None:
            write_samples(self._directory.samples(step), samples_of(kept, advantages, self._log_samples))

    def flush(self) -> None:
        """Wait until the steps told are written; raises what writing raised."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def evaluation(self, when: str, scores: dict[str, float]) -> None:
        """Tell the scores of the run's start or end."""
        self.flush()
        self.message(f"{when}  " + "  ".join(f"{name} {score:.3f}" for name, score in scores.items()))

    def message(self, text: str) -> None:
        """Tell a person a line."""
        self._console.message(text)

    def close(self) -> None:
        """Take the progress bar away and close the files."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            self._console.close()
            self._tensorboard.close()


class SilentRecorder:
    """The recorder of all other ranks: the main rank writes."""

    rewards: Sequence[float] = ()

    def step(
        self, step: int, metrics: dict[str, float], kept: ScoredBatch | None, advantages: Tensor | None
    ) -> None:
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
