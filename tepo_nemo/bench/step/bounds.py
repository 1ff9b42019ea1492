"""What has been promised of a step, and what was measured."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tepo_nemo.bench.step.names import ALIGNER, BALANCE, OURS, SCALED

_MOST_PADDING = _MOST_IMBALANCE = _MOST_OVERHEAD = 0.05
_TIMES_SKEWED, _TIMES_EQUAL, _TIMES_GENERATION = 3, 1, 2
_GROWTH = 0.1
_OVERHEAD_MODEL = "wide"

Figures = Mapping[str, Any]


class Bound(NamedTuple):
    name: str
    bound: str
    figure: str
    holds: bool


def bounds_of(cases: Mapping[str, Figures], shares: Iterable[Figures]) -> list[dict[str, Any]]:
    """The bounds on all cases and shares; a figure that is short of its bound is one too."""
    of_cases = (bound for case in cases.values() for bound in _of_case(case))
    of_shares = (bound for each in shares for bound in _of_shares(each))
    return [bound._asdict() for bound in (*of_cases, *of_shares)]


def _of_shares(shares: Figures) -> Iterator[Bound]:
    name = f"the paper's batch on {shares['ranks']} copies of the model"
    yield _little_padding(name, shares["padding"], shares["padding_to_longest"])
    if shares["ranks"] > 1:
        arrival = f" (as they come: {shares['imbalance_of_arrival']:.1%})"
        yield _even_load(name, shares["imbalance"], arrival)


def _little_padding(name: str, padding: float, to_longest: float) -> Bound:
    figure = f"{padding:.1%} (padded to the longest: {to_longest:.1%})"
    what = f"{name}: padding of trained positions"
    return Bound(what, f"< {_MOST_PADDING:.0%}", figure, padding < _MOST_PADDING)


def _even_load(name: str, imbalance: float, remark: str = "") -> Bound:
    what, figure = f"{name}: load imbalance", f"{imbalance:.1%}{remark}"
    return Bound(what, f"< {_MOST_IMBALANCE:.0%}", figure, imbalance < _MOST_IMBALANCE)


def _of_case(case: Figures) -> Iterator[Bound]:
    name, rows = case["name"], case["rows"]
    work = case["workload"]
    ours = rows[OURS]
    yield _passes(name, ours["passes"], work["updates"])
    if case["balanced"]:
        yield _little_padding(name, ours["padding"], rows[BALANCE]["padding"])
        if work["data"] > 1:
            yield _even_load(name, ours["imbalance"])
    if case["aligner"] and case["rounds"]:
        least = _TIMES_SKEWED if work["lengths"] == "skewed" else _TIMES_EQUAL
        times = rows[ALIGNER]["times_ours"]
        yield _at_least(f"{name}: trained tokens a second, ours / {ALIGNER}", least, times)
    if "generation" in case:
        generation = case["generation"]
        yield _at_least(f"{name}: generation, ours / NeMo's", _TIMES_GENERATION, generation["times_as_fast"])
        equal = generation["equal"]
        yield Bound(f"{name}: greedy responses", "those of NeMo", "equal" if equal else "differ", equal)
    if work["model"] == _OVERHEAD_MODEL and case["aligner"] and case["rounds"]:
        yield Bound(f"{name}: overhead of the trainer", f"< {_MOST_OVERHEAD:.0%} of a step",
                    f"{ours['overhead']:.1%}", ours["overhead"] < _MOST_OVERHEAD)  # fmt: skip
    if case["scaled"]:
        for scaled in SCALED:
            # The work doubles; attention may make it more.
            most = max(2, growth(case, scaled)) * (1 + _GROWTH)
            times = rows[scaled]["times_ours"]["median"]
            what = f"{name}: time of a step, {scaled}"
            yield Bound(what, f"<= {most:.2f}x", f"{times:.2f}x", times <= most)


def _passes(name: str, passes: float, updates: int) -> Bound:
    """One for the updates, and one for the old statistics of all mini-batches but the first."""
    exact = 1 + (updates - 1) / updates
    what = f"{name}: forward passes a response, updates: {updates}"
    return Bound(what, f"{exact:g}", f"{passes:g}", passes == exact)


def growth(case: Figures, scaled: str) -> float:
    """By how much the work of a step grows: operations of its transformer layers, attention's included."""
    return case["rows"][scaled]["layer_flops"] / case["rows"][OURS]["layer_flops"]


def _at_least(name: str, least: float, times: Figures) -> Bound:
    interval = f"{times['low']:.2f} to {times['high']:.2f}"
    return Bound(name, f">= {least:g}x", f"{times['median']:.2f}x ({interval})", times["median"] >= least)
