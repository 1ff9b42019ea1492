"""Everything that is measured of one cell, on each of its ranks: peaks, then times, then counts."""

import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_nemo.bench.counting import CollectiveCounter, held_by_nodes, saved_for_backward
from tepo_nemo.bench.implementations import (
    Built,
    implementations_of_logits,
    implementations_of_output_layer,
)
from tepo_nemo.bench.job import Cell
from tepo_nemo.bench.memory import LiveStorage, high_water_bytes, prepare_high_water
from tepo_nemo.bench.problem import (
    Implementation,
    Mode,
    Problem,
    Reference,
    Run,
    largest_error,
    make_problem,
)
from tepo_nemo.bench.timing import Times, ratio, time_pairs, time_run
from tepo_nemo.bench.world import in_child_group
from tepo_nemo.parallel import vocab_shard

_FEW = 8  # tokens
_FEWEST_PAIRS = 3  # of a row that takes longer than it may

Say = Callable[[str], None]
Peaks = dict[tuple[str, Mode, int], int]  # (implementation, mode, tokens) -> bytes


def implementations_of(cell: Cell, ranks: int) -> Built:
    build = implementations_of_logits if cell.hidden_size is None else implementations_of_output_layer
    return build(ranks)


def measure_peaks(cell: Cell, ranks: int, file: Path, say: Say) -> Peaks:
    """Peak memory of each implementation and mode, each in a process of its own; before there is a group.

    Args:
        file: a path that all ranks share; the processes meet in files beside it.
    """
    peaks: Peaks = {}
    for implementation in implementations_of(cell, ranks)[0] if cell.memory_tokens else ():
        say(f"memory of {implementation.name}")
        for mode in implementation.modes:
            # How the peak grows with the tokens is of interest where it need not.
            for tokens in cell.memory_tokens[-1:] if mode.trains else cell.memory_tokens:
                peak = partial(_peak, implementation, mode, cell, tokens)
                meeting = file.with_name(f"{file.name}.{len(peaks)}")
                peaks[implementation.name, mode, tokens] = in_child_group(peak, meeting)
    return peaks


def _peak(
    implementation: Implementation, mode: Mode, cell: Cell, tokens: int, group: dist.ProcessGroup
) -> int:
    problem = make_problem(tokens, cell.vocab_size, group, cell.hidden_size)
    prepare_high_water()

    def once(run: Run) -> None:
        run.forward()
        run.backward()

    # Compiles, loads code, sets up connections; the compiler may want to know the sizes.
    few = problem if implementation.compiled else make_problem(_FEW, cell.vocab_size, group, cell.hidden_size)
    once(Run(implementation, mode, few))
    run = Run(implementation, mode, problem)
    return high_water_bytes(lambda: once(run))


def measure_times(cell: Cell, group: dist.ProcessGroup, say: Say) -> dict[str, Any]:
    """Times and errors of every implementation, in a table that the other figures are put into."""
    load_before = os.getloadavg()[0]
    implementations, absent = implementations_of(cell, dist.get_world_size(group))
    problem = make_problem(cell.tokens, cell.vocab_size, group, cell.hidden_size)
    reference = Reference.of(problem)
    rows: dict[str, Any] = {
        each.name: {"note": each.note, "modes": {mode.value: {} for mode in each.modes}}
        for each in implementations
    }
    base = implementations[0]
    for mode in Mode:
        measured = [each for each in implementations if mode in each.modes]
        for each in measured:
            say(f"{mode.value}: errors of {each.name}")
            figures = rows[each.name]["modes"][mode.value]
            figures["time"] = {"first_call_s": time_run(partial(Run, each, mode, problem)).total}
            figures |= _check(each, mode, problem, reference)
        base_times: list[Times] = []
        for each in measured[1:]:
            say(f"{mode.value}: times of {each.name}")
            figures, times = _race(base, each, mode, problem, cell)
            rows[each.name]["modes"][mode.value]["time"] |= figures
            base_times += times
        rows[base.name]["modes"][mode.value]["time"] |= {"pairs": len(base_times), **_medians(base_times)}
    return {
        "tensor_parallel": problem.ranks,
        "vocab_size": cell.vocab_size,
        "tokens": cell.tokens,
        "hidden_size": cell.hidden_size,
        "chunk_bytes": 4 * vocab_shard.CHUNK_LOGITS["cpu"],
        "load_average": [load_before, os.getloadavg()[0]],
        "implementations": rows,
        "absent": absent,
    }


def add_counts(table: dict[str, Any], cell: Cell, group: dist.ProcessGroup, say: Say) -> None:
    """Put exact counts into a table. Last of all: code that has been watched does not run compiled again."""
    problem = make_problem(cell.tokens, cell.vocab_size, group, cell.hidden_size)
    for implementation in implementations_of(cell, problem.ranks)[0]:
        say(f"counts of {implementation.name}")
        for mode in implementation.modes:
            figures = table["implementations"][implementation.name]["modes"][mode.value]
            figures |= _count(implementation, mode, problem)


def add_peaks(table: dict[str, Any], peaks: Peaks) -> None:
    for (name, mode, tokens), size in peaks.items():
        figures = table["implementations"][name]["modes"][mode.value]
        figures.setdefault("peak_process_bytes", {})[str(tokens)] = size


def _race(
    base: Implementation, other: Implementation, mode: Mode, problem: Problem, cell: Cell
) -> tuple[dict[str, Any], list[Times]]:
    """Figures of `other` against `base`, and the times of `base`."""
    time_base, time_other = (partial(time_run, partial(Run, each, mode, problem)) for each in (base, other))
    start = time.perf_counter()
    time_pairs(time_base, time_other, 1)
    pair_s = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(pair_s, op=dist.ReduceOp.MAX)  # all ranks must come to the same number
    pairs = min(cell.pairs, max(_FEWEST_PAIRS, int(cell.row_seconds / pair_s.item())))
    timed = time_pairs(time_base, time_other, pairs)
    total = ratio([(a.total, b.total) for a, b in timed])
    figures = {
        "pairs": pairs,
        **_medians([times for _, times in timed]),
        "ratio": total.median,
        "ratio_low": total.low,
        "ratio_high": total.high,
        "forward_ratio": ratio([(a.forward, b.forward) for a, b in timed]).median,
    }
    if mode.trains:
        figures["backward_ratio"] = ratio(
            [(a.total - a.forward, b.total - b.forward) for a, b in timed]
        ).median
    return figures, [times for times, _ in timed]


def _medians(times: list[Times]) -> dict[str, float]:
    """Seconds."""
    return {
        "total_s": median(each.total for each in times),
        "forward_s": median(each.forward for each in times),
        "backward_s": median(each.total - each.forward for each in times),
    }


def _check(
    implementation: Implementation, mode: Mode, problem: Problem, reference: Reference
) -> dict[str, Any]:
    if not implementation.gives_logprob:
        return {"ranks_agree": None, "errors": {}}
    run = Run(implementation, mode, problem)
    run.forward()
    run.backward()
    outputs = [output for output in (run.logprob, run.entropy) if output is not None]
    return {
        "ranks_agree": all(_same_bits(output, problem.group) for output in outputs),
        "errors": _errors(run, mode, problem, reference),
    }


def _count(implementation: Implementation, mode: Mode, problem: Problem) -> dict[str, Any]:
    run = Run(implementation, mode, problem)
    forward, backward, live = CollectiveCounter(), CollectiveCounter(), LiveStorage()
    with saved_for_backward() as saved, live, forward:
        run.forward()
    saved.add(held_by_nodes(output for output in (run.logprob, run.entropy) if output is not None))
    saved_bytes = saved.take_bytes((*run.leaves, *run.work, problem.target))
    with live, backward:
        run.backward()
    return {
        "collectives_forward": forward.calls,
        "collectives_backward": backward.calls,
        "bytes_per_token_forward": forward.bytes / problem.tokens,
        "bytes_per_token_backward": backward.bytes / problem.tokens,
        "saved_bytes": saved_bytes,
        "peak_tracked_bytes": None if implementation.compiled else live.peak,
    }


def _same_bits(value: Tensor, group: dist.ProcessGroup) -> bool:
    bits = value.detach().contiguous().view(torch.int32)
    gathered = [torch.empty_like(bits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, bits, group=group)
    return all(torch.equal(gathered[0], each) for each in gathered)


def _errors(run: Run, mode: Mode, problem: Problem, reference: Reference) -> dict[str, float | None]:
    """Errors relative to max(1, |value|), those of the hard tokens apart: the worst of all ranks.

    None is one that is not finite.
    """
    errors = {}

    def add(name: str, found: Tensor, right: Tensor) -> None:
        errors[name] = largest_error(found[problem.hard :], right[problem.hard :])
        if problem.hard:
            errors[f"{name}, hard tokens"] = largest_error(found[: problem.hard], right[: problem.hard])

    add("log-prob", run.logprob.detach(), reference.logprob)
    if run.entropy is not None and run.entropy.dim() == 0:
        errors["entropy"] = largest_error(run.entropy.detach(), reference.entropy[:-1].mean())
    elif run.entropy is not None:
        add("entropy", run.entropy.detach(), reference.entropy)
    if mode.trains:
        right = reference.gradient(problem, mode)
        add("gradient", run.gradients[0][: len(right)], right)
    worst = torch.tensor(list(errors.values()), dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=problem.group)
    return {
        name: error if math.isfinite(error) else None
        for name, error in zip(errors, worst.tolist(), strict=True)
    }
