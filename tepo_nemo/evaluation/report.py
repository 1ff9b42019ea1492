"""The report of an evaluation: every score, also without what is in the training set, beside the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tepo_nemo.evaluation.paper import BENCHMARKS, MAIN_MODEL, ROWS, PaperRow
from tepo_nemo.evaluation.records import ProblemRecord
from tepo_nemo.evaluation.scores import (
    Averages,
    BenchmarkScore,
    Score,
    averages,
    score_benchmark,
)


@dataclass(frozen=True)
class Report:
    """Scores of all benchmarks, and of the problems that are not in the training set."""

    scores: dict[str, BenchmarkScore]
    clean: dict[str, BenchmarkScore | None]  # None where no problem is left
    overlapping: dict[str, int]  # problems that also occur in the training set
    averages: Averages
    clean_averages: Averages | None  # None where a benchmark has no problem left

    def to_json(self) -> dict:
        """For `report.json`; fractions, not per cent."""
        return {
            "benchmarks": {
                name: asdict(score)
                | {
                    "overlapping": self.overlapping[name],
                    "without_overlap": self.clean[name] and asdict(self.clean[name]),
                }
                for name, score in self.scores.items()
            },
            "averages": asdict(self.averages),
            "averages_without_overlap": self.clean_averages and asdict(self.clean_averages),
        }


def make_report(
    records: Mapping[str, Sequence[ProblemRecord]],
    ks: Mapping[str, Sequence[int]],
    overlapping: Mapping[str, set[str]],
) -> Report:
    """Score every benchmark.

    Args:
        records: the problems of each benchmark.
        ks: of each benchmark, for pass@k and majority@k.
        overlapping: ids of the problems of each benchmark that also occur in the training set.
    """
    clean = {
        name: [record for record in of_set if record.id not in overlapping[name]]
        for name, of_set in records.items()
    }
    return Report(
        scores={name: score_benchmark(of_set, ks[name]) for name, of_set in records.items()},
        clean={name: score_benchmark(of_set, ks[name]) if of_set else None for name, of_set in clean.items()},
        overlapping={name: len(ids) for name, ids in overlapping.items()},
        averages=averages(records),
        clean_averages=averages(clean) if all(clean.values()) else None,
    )


def render(report: Report, model: str) -> str:
    """The report as text: one line a benchmark, then the table in the paper's layout.

    Args:
        model: of configs/model; the paper's rows of this model are shown, or those of its main model.
    """
    return "\n\n".join((_details(report), _table(report, model))) + "\n"


def _details(report: Report) -> str:
    header = ("", "problems", "avg@k", "95 %", "pass@k", "majority@k", "unparseable", "timeout", "error",
              "length", "truncated", "in training set", "avg@k without")  # fmt: skip
    rows = [header]
    for name, score in report.scores.items():
        clean = report.clean[name]
        rows.append(
            (
                _label(name),
                f"{score.problems} x {score.samples}",
                f"{100 * score.average.value:.2f}",
                _interval(score.average),
                _per_k(score.pass_at),
                _per_k(score.majority_at),
                str(score.unparseable),
                str(score.timeouts),
                str(score.errors),
                f"{score.mean_length:.1f}",
                f"{100 * score.truncated:.1f} %",
                str(report.overlapping[name]),
                "-" if clean is None else f"{100 * clean.average.value:.2f}",
            )
        )
    return _aligned(rows)


def _table(report: Report, model: str) -> str:
    """Rows of ours and of the paper, in per cent, with both averages."""
    names = [name for name in BENCHMARKS if name in report.scores]
    names += [name for name in report.scores if name not in BENCHMARKS]
    rows = [("%", *map(_label, names), "Avg, generations", "Avg, benchmarks")]
    rows.append(_own_row("this model", names, report.scores, report.averages))
    rows.append(_own_row("without overlap", names, report.clean, report.clean_averages))
    if set(names) & set(BENCHMARKS):
        known = [row for row in ROWS if row.model == model] or [
            row for row in ROWS if row.model == MAIN_MODEL
        ]
        rows += [_paper_row(row, names) for row in known]
    return _aligned(rows)


def _paper_row(row: PaperRow, names: Sequence[str]) -> tuple[str, ...]:
    """Its averages too where they are over the same benchmarks."""
    printed = dict(zip(BENCHMARKS, row.scores, strict=True))
    both: list[float | None] = [None, None]
    if set(names) == set(BENCHMARKS):
        both = [row.average, None if None in row.scores else sum(row.scores) / len(row.scores)]
    cells = ["-" if value is None else f"{value:.2f}" for value in (*map(printed.get, names), *both)]
    return (f"paper: {row.model}, {row.method}", *cells)


def _own_row(
    label: str,
    names: Sequence[str],
    scores: Mapping[str, BenchmarkScore | None],
    both: Averages | None,
) -> tuple[str, ...]:
    cells = ["-" if scores[name] is None else f"{100 * scores[name].average.value:.2f}" for name in names]
    if both is None:
        return (label, *cells, "-", "-")
    return (label, *cells, *(_with_interval(s) for s in (both.over_generations, both.over_benchmarks)))


def _label(name: str) -> str:
    return BENCHMARKS[name].label if name in BENCHMARKS else name


def _interval(score: Score) -> str:
    return f"[{100 * score.low:.2f}, {100 * score.high:.2f}]"


def _with_interval(score: Score) -> str:
    return f"{100 * score.value:.2f} {_interval(score)}"


def _per_k(values: Mapping[int, float]) -> str:
    return " ".join(f"@{k} {100 * value:.2f}" for k, value in values.items()) or "-"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
