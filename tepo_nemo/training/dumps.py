"""Rollouts on disk: what a step trained on, so that it can be trained on again without generation.

    rollouts/step_000012/                    every `trainer.dump_rollouts` steps
    bad_updates/step_000012_update_003/      of a step with a skipped update, the newest ones
        rollout.json             prompts with tokens and golds, texts, rewards with their status, the step,
                                 the configuration, and why the update was skipped
        rollout.safetensors      responses: token ids, lengths, whether they ended, the sampler's log-probs

A dump holds all that was generated in a step, also what dynamic sampling dropped. It holds no weights.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tepo_nemo.errors import UserError
from tepo_nemo.rollout.batch import ScoredBatch
from tepo_nemo.runs.directory import RunDirectory
from tepo_nemo.runs.files import parse_json_object, to_json
from tepo_nemo.training.collect import CollectedStep
from tepo_nemo.training.stored import scored_numbers, scored_tensors, stored_scored

FORMAT = 1
BAD_UPDATES_KEPT = 4
_NUMBERS, _TENSORS = "rollout.json", "rollout.safetensors"


@dataclass(frozen=True)
class RolloutDump:
    """What `write_dump` wrote."""

    step: int  # number of the step; the first is 1
    collected: CollectedStep
    about: Mapping[str, Any]


class RolloutDumps:
    """Writes the dumps of a run, on its main rank. One that cannot be written is told, and the run goes on.

    Args:
        every: steps between two whole rollouts; 0 is none.
        about: JSON that says what made them.
        report: tells a person a line.
    """

    def __init__(
        self, directory: RunDirectory, *, every: int, about: Mapping[str, Any], report: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._every = every
        self._about = about
        self._report = report

    def rollout(self, step: int, collected: CollectedStep) -> None:
        """The rollout of a step, where it is its turn."""
        if self._every and step % self._every == 0:
            self._write(self._directory.rollout(step), step, collected, {})

    def bad_update(self, step: int, update: int, why: str, collected: CollectedStep) -> None:
        """The rollout of a skipped update; of all of these the newest `BAD_UPDATES_KEPT` are kept."""
        folder = self._directory.bad_update(step, update)
        self._write(folder, step, collected, {"update": update, "why": why})
        kept = sorted(path for path in folder.parent.glob("step_*") if path.is_dir())
        for path in kept[:-BAD_UPDATES_KEPT]:
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, folder: Path, step: int, collected: CollectedStep, more: Mapping[str, Any]) -> None:
        try:
            write_dump(folder, step, collected, {**self._about, **more})
        except OSError as error:
            self._report(f"{folder} could not be written: {error.strerror}")


def write_dump(folder: Path, step: int, collected: CollectedStep, about: Mapping[str, Any]) -> None:
    """Write a rollout as a folder that is complete or absent; one of an earlier process is replaced.

    Raises OSError.
    """
    generated, kept = collected.generated, collected.kept
    numbers = {
        "format": FORMAT,
        "step": step,
        "consumed_prompts": collected.consumed_prompts,
        "kept_groups": list(collected.kept_groups),
        "kept_width": 0 if kept is None else kept.rollouts.generation.tokens.shape[1],
        "about": about,
        **scored_numbers(generated),
    }
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / _NUMBERS).write_text(to_json(numbers) + "\n", encoding="utf-8")
        tensors = {name: value.contiguous() for name, value in scored_tensors(generated).items()}
        (partial / _TENSORS).write_bytes(save(tensors))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def find_dumps(path: Path) -> list[Path]:
    """The dumps of `path`, in the order of their steps: itself, or those of consecutive steps inside it.

    Raises UserError where there are none.
    """
    if (path / _NUMBERS).is_file():
        return [path]
    found = sorted(folder for folder in path.glob("step_*") if (folder / _NUMBERS).is_file())
    if not found:
        raise UserError(
            f"replay={path}: holds no rollout (give one of rollouts/ or bad_updates/ of a run, or rollouts/)"
        )
    return found


def read_dump(folder: Path) -> RolloutDump:
    """Read a dump and see that it is whole. Raises UserError."""
    try:
        numbers = parse_json_object((folder / _NUMBERS).read_bytes())
        if numbers["format"] != FORMAT:
            raise ValueError(f"its format is {numbers['format']}, and this version reads {FORMAT}")
        tensors = load((folder / _TENSORS).read_bytes())
        generated = stored_scored(numbers, tensors)
        _check(generated)
        collected = CollectedStep(
            kept=_kept(generated, numbers["kept_groups"], numbers["kept_width"]),
            generated=generated,
            kept_groups=numbers["kept_groups"],
            consumed_prompts=int(numbers["consumed_prompts"]),
        )
        return RolloutDump(int(numbers["step"]), collected, dict(numbers["about"]))
    except KeyError as error:
        reason = f"it lacks {error}"
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = str(error)
    raise UserError(f"replay={folder}: cannot be used, {reason} (give another dump)")


def _kept(generated: ScoredBatch, groups: list[int], width: int) -> ScoredBatch | None:
    if not groups:
        return None
    if not set(groups) <= set(range(len(generated.rollouts.prompts))):
        raise ValueError("it keeps prompts that it does not have")
    kept = generated.select_groups(groups)
    generation = kept.rollouts.generation
    if int(generation.lengths.max()) > width:
        raise ValueError("its responses are longer than it says")
    # A sum over columns is rounded by how many there are.
    narrow = replace(generation, tokens=generation.tokens[:, :width], logprobs=generation.logprobs[:, :width])
    return replace(kept, rollouts=replace(kept.rollouts, generation=narrow))


def _check(scored: ScoredBatch) -> None:
    """Raises ValueError where the parts do not fit each other."""
    rollouts = scored.rollouts
    generation, count, prompts = rollouts.generation, len(rollouts), len(rollouts.prompts)
    width = generation.tokens.shape[1]

    def expect(tensor: Tensor, *shape: int, dtype: torch.dtype = torch.int64) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"a tensor of {list(tensor.shape)} {tensor.dtype} stands for {list(shape)} {dtype}"
            )

    expect(rollouts.groups, count)
    expect(rollouts.samples, count)
    expect(generation.tokens, count, width)
    expect(generation.lengths, count)
    expect(generation.finished, count, dtype=torch.bool)
    expect(generation.logprobs, count, width, dtype=torch.float32)
    if not len(scored.texts) == len(scored.results) == count > 0:
        raise ValueError("its numbers of responses, texts and rewards differ")
    lengths, groups = generation.lengths, rollouts.groups
    if (
        int(lengths.min()) < 1
        or int(lengths.max()) > width
        or not set(groups.tolist()) == set(range(prompts))
    ):
        raise ValueError("its responses and prompts do not belong together")
    if not all(prompt.tokens for prompt in rollouts.prompts):
        raise ValueError("it has a prompt without tokens")
