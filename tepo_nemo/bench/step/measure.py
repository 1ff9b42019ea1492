"""Counts and times the steps of a case, on every rank."""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator

from tepo_nemo.bench.step.aligner import AlignerStep
from tepo_nemo.bench.step.job import Case
from tepo_nemo.bench.step.levers import LEVERS, Variant, in_batches_of
from tepo_nemo.bench.step.names import ALIGNER, OURS, SINGLE
from tepo_nemo.bench.step.ours import OurStep, compare_generation_alone
from tepo_nemo.bench.step.passes import (
    Purpose,
    Shape,
    counting_passes,
    imbalance,
    layer_flops,
    padding_fraction,
)
from tepo_nemo.bench.step.taken import CATEGORIES, Step
from tepo_nemo.bench.step.workload import Workload
from tepo_nemo.bench.timing import ratio
from tepo_nemo.nemo.build import Host, build_host

Say = Callable[[str], None]
Seconds = dict[str, float]


class Row(NamedTuple):
    step: Step
    workload: Workload


def measure_case(case: Case, folder: Path, say: Say) -> dict[str, Any]:
    """Everything about a case; the same on every rank."""
    gc.collect()  # the models of the case before
    say(f"{case.name}: {case.workload.responses} responses of {case.workload.trained_tokens} tokens a step")
    theirs = {}
    if case.aligner:
        destroy_num_microbatches_calculator()  # NeMo holds a process to the batch sizes of its first model
        theirs[ALIGNER] = Row(AlignerStep(case.workload, folder), case.workload)
    destroy_num_microbatches_calculator()
    host = build_host(case.workload.config(folder))
    rows = theirs | _our_rows(case, host, folder)
    figures = {}
    for name, row in rows.items():
        figures[name] = _count(row)
        say(f"  {name}: {figures[name]['passes']:.3f} passes a response")
    times: dict[str, list[Seconds]] = {name: [] for name in rows}
    for index in range(case.rounds):
        # To and fro, so that no row gains from a drift.
        for name in rows if index % 2 == 0 else reversed(rows):
            times[name].append(_time(rows[name].step))
            say(f"  {name}: {times[name][-1]['step']:.2f} s")
    if case.rounds:
        for name, of_row in times.items():
            figures[name] |= _summary(of_row, times[OURS], rows[name].workload)
    result = asdict(case) | {
        "longest": case.workload.longest,
        "responses": case.workload.responses,
        "tokens": case.workload.trained_tokens,
        "rows": figures,
    }
    if case.generation_pairs:
        speed = compare_generation_alone(host, case.workload, folder, case.generation_pairs)
        result["generation"] = speed._asdict() | {"times_as_fast": speed.times_as_fast._asdict()}
        say(f"  generation alone: {speed.times_as_fast.median:.2f} times as fast as NeMo's")
    return result


def _our_rows(case: Case, host: Host, folder: Path) -> dict[str, Row]:
    workload = case.workload
    base = Variant()
    if case.batches > 1:
        base = in_batches_of(workload.responses // case.batches // workload.data)
    asked = {OURS: (base, workload)}
    if case.single:
        asked[SINGLE] = (Variant(("trainer.micro_batch_size=1",)), workload)
    asked |= {name: (LEVERS[name].on_top_of(base), workload) for name in case.levers}
    asked |= {name: (Variant(), of_row) for name, of_row in case.workloads().items()}
    return {
        name: Row(OurStep(host, of_row, variant, folder, folder / "runs" / f"{case.name}_{index}"), of_row)
        for index, (name, (variant, of_row)) in enumerate(asked.items())
    }


def _count(row: Row) -> dict[str, Any]:
    """What passes through the model in one step, which also warms up."""
    step, workload = row
    actor = step.actor
    with counting_passes(actor.get_model_module_list()[0], step.optimizer) as passes:
        taken = step()

    def work(shape: Shape) -> int:
        return layer_flops(shape, actor.cfg.hidden_size, actor.cfg.ffn_hidden_size)

    positions = _over_copies(passes.positions(Purpose.TRAINING), workload)
    shortest = min(workload.prompt_lengths())
    rows = passes.rows(Purpose.STATISTICS, Purpose.TRAINING, shortest=shortest)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [sum(map(work, update)) for update in passes.updates])
    return {
        "updates": len(passes.updates),
        "trained_tokens": taken.trained_tokens,
        "passes": _over_copies(rows, workload) / workload.responses,
        "generated_positions": _over_copies(passes.positions(Purpose.GENERATION), workload),
        "trained_positions": positions,
        "padding": padding_fraction(positions, workload.positions),
        "imbalance": imbalance(of_ranks),
        "layer_flops": sum(map(sum, of_ranks)) // workload.tensor,
    }


def _over_copies(count: int, workload: Workload) -> int:
    """The sum over copies of the model; the ranks of one count the same."""
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total) // workload.tensor


def _time(step: Step) -> Seconds:
    """Seconds of one step and of its categories, of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    taken = step()
    whole = time.perf_counter() - start
    slowest = torch.tensor([whole, *(getattr(taken, name) for name in CATEGORIES)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    seconds = dict(zip(("step", *CATEGORIES), slowest.tolist(), strict=True))
    return seconds | {"other": max(0.0, seconds["step"] - sum(seconds[name] for name in CATEGORIES))}


def _summary(times: list[Seconds], ours: list[Seconds], workload: Workload) -> dict[str, Any]:
    """Medians over the rounds, the spread of whole steps, and paired ratios to ours."""
    steps = [seconds["step"] for seconds in times]
    pairs = [(own["step"], other["step"]) for own, other in zip(ours, times, strict=True)]
    return {
        "seconds": {name: median([seconds[name] for seconds in times]) for name in times[0]},
        "fastest": min(steps),
        "slowest": max(steps),
        "tokens_per_second": workload.trained_tokens / median(steps),
        "overhead": median([seconds["other"] / seconds["step"] for seconds in times]),
        "times_ours": ratio(pairs)._asdict(),
    }
