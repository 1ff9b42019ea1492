"""The tables of the benchmark."""

from collections.abc import Iterator, Mapping
from typing import Any

from tepo_nemo.bench.step.bounds import growth
from tepo_nemo.bench.step.names import ALIGNER, OURS, SCALED, SINGLE
from tepo_nemo.runs.tables import Table

Figures = Mapping[str, Any]

_COLUMNS = (
    "step", "s (fastest to slowest)", "generation", "old statistics", "training", "other",
    "trained tokens a s", "x ours (95 %)", "padding", "passes a response",
)  # fmt: skip
_LEGEND = (
    f"{ALIGNER}: its ReinforceTrainer and REINFORCE actor, live, from the same initial weights, on the same"
    " prompts, number and lengths of responses and updates; TensorRT-LLM is off: it generates with Megatron's"
    " generate; it has no KL penalty, which would cost it a third pass; micro-batches of one response, since"
    " its loss breaks above",
    f"{OURS}: training.trainer.Trainer under TEPO as it is shipped, with all that it writes down a step",
    "responses are as long as they are told to be, the same for both; what they say is each one's own",
    "s: medians over the rounds, of the slowest rank",
    "categories: by each trainer's own timers; training: with the optimizer",
    "x ours: median of the ratios of steps that took turns, with its bootstrap interval",
    "padding: share of the positions in training passes that no trained token needs",
    "passes a response: forward passes beside generation, counted at the model",
)


def all_tables(results: Figures) -> list[Table]:
    return [_facts(results), *_of_cases(results), _shares(results), _bounds(results)]


def main_tables(results: Figures) -> list[Table]:
    return [*_of_cases(results), _shares(results), _bounds(results)]


def _facts(results: Figures) -> Table:
    facts = {**results["machine"], **results["versions"]}
    return Table(
        "Machine and versions", ("what", ""), [(key, str(value)) for key, value in facts.items()], _LEGEND
    )


def _of_cases(results: Figures) -> Iterator[Table]:
    for case in results["cases"].values():
        rows = case["rows"]
        if case["scaled"]:
            yield _scaling(case)
        elif case["rounds"]:
            if case["aligner"]:
                compared = [name for name in (ALIGNER, SINGLE, OURS) if name in rows]
                yield Table(_title(case), _COLUMNS, [_row(name, rows[name]) for name in compared])
            if case["levers"]:
                off = [_row(f"without: {name}", rows[name]) for name in case["levers"]]
                batches = f", {case['batches']} batches to grade" if case["batches"] > 1 else ""
                title = f"{_title(case)}{batches}: each lever off"
                yield Table(title, _COLUMNS, [_row(OURS, rows[OURS]), *off])
        else:
            yield _counts(case)
        if "generation" in case:
            yield _generation(case)


def _title(case: Figures) -> str:
    work = case["workload"]
    return (
        f"{work['model']}, {work['lengths']} lengths: {case['responses']} responses, {case['tokens']} tokens,"
        f" longest {case['longest']}, updates {work['updates']}, TP {work['tensor']}, DP {work['data']}"
    )


def _row(name: str, figures: Figures) -> tuple[str, ...]:
    seconds, times = figures["seconds"], figures["times_ours"]
    return (
        name,
        f"{seconds['step']:.2f} ({figures['fastest']:.2f} to {figures['slowest']:.2f})",
        *(f"{seconds[category]:.2f}" for category in ("generation", "statistics", "training", "other")),
        f"{figures['tokens_per_second']:,.0f}",
        "1" if name == OURS else f"{times['median']:.2f} ({times['low']:.2f} to {times['high']:.2f})",
        f"{figures['padding']:.1%}",
        f"{figures['passes']:g}",
    )


def _counts(case: Figures) -> Table:
    rows = [
        (name, f"{row['passes']:g}", f"{row['padding']:.1%}", f"{row['imbalance']:.1%}")
        for name, row in case["rows"].items()
    ]
    columns = ("step", "passes a response", "padding", "load imbalance")
    notes = ("load imbalance: by how much the busiest rank of each update exceeds the mean, in operations",)
    return Table(f"{_title(case)}: counts", columns, rows, notes)


def _scaling(case: Figures) -> Table:
    base = case["rows"][OURS]
    rows = []
    for name in (OURS, *SCALED):
        figures = case["rows"][name]
        times = figures["times_ours"]
        of_passes = sum(figures["seconds"][part] for part in ("statistics", "training"))
        of_base = sum(base["seconds"][part] for part in ("statistics", "training"))
        rows.append(
            (
                name,
                f"{figures['seconds']['step']:.2f}",
                f"{times['median']:.2f} ({times['low']:.2f} to {times['high']:.2f})",
                f"{figures['seconds']['generation'] / base['seconds']['generation']:.2f}",
                f"{of_passes / of_base:.2f}",
                f"{1.0 if name == OURS else growth(case, name):.2f}",
            )
        )
    columns = ("step", "s", "x (95 %)", "x generation", "x old statistics and training", "x work")
    notes = ("work: operations of the transformer layers in the training passes, counted",)
    return Table(f"{_title(case)}: growth", columns, rows, notes)


def _shares(results: Figures) -> Table:
    rows = [
        (
            str(each["ranks"]),
            f"{each['micro_batches']:.1f}",
            f"{each['padding']:.1%}",
            f"{each['padding_to_longest']:.1%}",
            f"{each['imbalance']:.1%}",
            f"{each['imbalance_of_arrival']:.1%}",
        )
        for each in results["shares"]
    ]
    columns = (
        "copies of the model", "micro-batches an update", "padding", "padded to the longest",
        "load imbalance", "as they come",
    )  # fmt: skip
    notes = (
        "counted, not timed: what the balancer makes of 512 responses; at the small lengths of the timed"
        " steps it leaves padding that costs less than another micro-batch",
    )
    return Table("A step of 64 x 8 responses, median 400 tokens, longest 4000", columns, rows, notes)


def _generation(case: Figures) -> Table:
    figures = case["generation"]
    times = figures["times_as_fast"]
    row = (
        f"{figures['tokens_per_second']:,.0f}",
        f"{figures['nemo_tokens_per_second']:,.0f}",
        f"{times['median']:.2f} ({times['low']:.2f} to {times['high']:.2f})",
        str(figures["equal"]),
    )
    columns = ("ours, tokens a s", "MegatronGPTModel.generate", "x (95 %)", "equal responses")
    return Table(f"{_title(case)}: generation alone, greedy, all responses at once", columns, [row])


def _bounds(results: Figures) -> Table:
    rows = [
        (each["name"], each["bound"], each["figure"], "holds" if each["holds"] else "SHORT")
        for each in results["bounds"]
    ]
    return Table("Must hold", ("what", "bound", "figure", ""), rows)
