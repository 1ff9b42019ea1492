"""The report of a study as text: its tables, and how far they can be trusted."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tepo_nemo.runs.files import to_json, write_atomic
from tepo_nemo.runs.tables import Table, print_tables, to_markdown
from tepo_nemo.study import schema
from tepo_nemo.study.measures import MEASURES, title_of
from tepo_nemo.study.pictures import draw
from tepo_nemo.study.plan import Plan
from tepo_nemo.study.results import Results, claim_data, to_data
from tepo_nemo.study.statistics import FEWEST_SEEDS, Summary, summarize

_RULE = (
    "appears: the whole 95 % interval of the difference of means lies on the expected side of 0; does not "
    "appear: none of it does; not decided by these seeds: it holds 0 and values on the expected side, or a "
    f"side has fewer than {FEWEST_SEEDS} seeds",
    "intervals: percentile bootstrap over seeds, each side resampled by itself; over few seeds they are too "
    "narrow (a nominal 95 % is some 85 % for the mean of five), and nothing is corrected for the number of "
    "claims",
    "a run that never reaches the threshold is censored: it counts as reaching it one step after its last, "
    "and decides nothing where that favours the claim",
)
_LEGEND = (
    "a cell is: mean ± standard deviation over seeds (95 % bootstrap interval of the mean); of two seeds the "
    "interval is no more than their range, and with one seed there is neither",
    "reached by k of n: the other runs are censored, they never reach the threshold; no mean is told then",
    "a number, k of n: the other runs have none (no update that could be measured)",
)


def write_report(study: schema.Study, plan: Plan, output: Path) -> None:
    """Write report.md, report.json and one PNG a figure to `output`, and print the tables.

    Raises:
        UserError: a file of a finished cell is broken.
    """
    results = Results.read(study, plan)
    tables = list(_tables(results))
    write_atomic(output / "report.json", to_json(to_data(results, output)) + "\n")
    for figure in study.figures:
        draw(figure, results, output / f"{figure.name}.png")
    pictures = "".join(f"![{figure.title}]({figure.name}.png)\n\n" for figure in study.figures)
    write_atomic(output / "report.md", to_markdown(study.name, [*tables, *_about(results)]) + pictures)
    print_tables(tables)


def _tables(results: Results) -> Iterator[Table]:
    yield _cells(results)
    if results.study.claims:
        yield _claims(results)
    for table in results.study.tables:
        if results.benchmarks:
            yield _accuracy(results, table)
        yield _training(results, table)


def _cells(results: Results) -> Table:
    study = results.study
    rows = [
        ("cells finished", f"{len(results.of_cell)} of {len(results.plan.cells())}"),
        ("not finished", ", ".join(cell.name for cell in results.missing) or "none"),
        ("every cell", " ".join(study.base)),
        ("side by side", f"{study.jobs} (seconds per step include what cells cost each other)"),
        ("computing", f"{sum(each.seconds for each in results.of_cell.values()) / 60:.0f} minutes of runs"),
    ]
    return Table("Cells", ("what", ""), rows)


def _claims(results: Results) -> Table:
    rows = []
    for claim in results.study.claims:
        found = claim_data(results, claim)
        counts, interval = found["counts"], found["interval"]
        text = "-" if found["difference"] is None else f"{found['difference']:+.4g}"
        text += f" ({interval[0]:+.4g} to {interval[1]:+.4g})" if interval else ""
        rows.append(
            (
                claim.claim,
                title_of(claim.measure, results.criteria),
                f"{claim.of} {claim.expect} than {claim.than or '0'}",
                text + (", with a lower bound" if found["bound"] else ""),
                f"{counts[0]}" if claim.than is None else f"{counts[0]} / {counts[1]}",
                found["verdict"],
            )
        )
    columns = ("direction", "measure", "expected", "difference of means (95 %)", "seeds", "verdict")
    return Table("Claims", columns, rows, notes=_RULE)


def _accuracy(results: Results, table: schema.Table) -> Table:
    def row(label: str, name: str, *, before: bool = False) -> tuple[str, ...]:
        accuracies = results.accuracies(label, before=before)
        return name, _count(results, label), *map(_percent, accuracies.values())

    first = table.rows[0].labels[0]
    before = results.accuracies(first, before=True)
    columns = ("", "seeds", *before)
    rows = _grouped(table, len(columns), lambda label: row(label, label))
    if any(summary.count for summary in before.values()):
        rows.insert(0, row(first, "before training", before=True))
    notes = (*_LEGEND[:1], *_samples(results))
    return Table(f"{table.title}: accuracy after training, %", columns, rows, notes)


def _samples(results: Results) -> list[str]:
    """What the columns of the accuracy are."""
    evaluation = results.plan.cells()[0].config.data.evaluation
    of_problems = [
        f"{each.name}: avg@{each.samples} of {results.benchmarks[each.name] // each.samples} problems"
        + (f" at temperature {each.temperature:g}" if each.temperature else ", greedy")
        for each in evaluation
    ]
    means = (
        "mean of benchmarks weighs each benchmark alike, mean of all answers each answer (the paper's Avg.)"
    )
    return [*of_problems, *([means] if len(evaluation) > 1 else [])]


def _training(results: Results, table: schema.Table) -> Table:
    def row(label: str) -> tuple[str, ...]:
        runs = len(results.of(label))
        summaries = {name: summarize(results.values(label, name)) for name in MEASURES}
        texts = (_text(summary, MEASURES[name].form, runs=runs) for name, summary in summaries.items())
        return label, _count(results, label), *texts

    columns = ("", "seeds", *(title_of(name, results.criteria) for name in MEASURES))
    return Table(f"{table.title}: training", columns, _grouped(table, len(columns), row), notes=_LEGEND)


def _grouped(
    table: schema.Table, width: int, row_of: Callable[[str], tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """The rows of all experiments of a table, each group under its heading."""
    rows = []
    for group in table.rows:
        if group.title is not None:
            rows.append((f"**{group.title}**", *[""] * (width - 1)))
        rows += map(row_of, group.labels)
    return rows


def _count(results: Results, label: str) -> str:
    finished, planned = len(results.of(label)), len(results.plan.rows[label])
    return str(planned) if finished == planned else f"{finished} of {planned}"


def _percent(summary: Summary) -> str:
    return _text(summary, "{:.1f}", runs=summary.count, scale=100.0)


def _text(summary: Summary, form: str, *, runs: int, scale: float = 1.0) -> str:
    if summary.mean is None:
        reached = summary.count - summary.censored
        return f"reached by {reached} of {summary.count}" if summary.censored else "-"
    text = form.format(summary.mean * scale)
    if summary.deviation is not None and summary.interval is not None:
        low, high = (form.format(edge * scale) for edge in summary.interval)
        text += f" ± {form.format(summary.deviation * scale)} ({low} to {high})"
    return text if summary.count == runs else f"{text}, {summary.count} of {runs}"


def _about(results: Results) -> Sequence[Table]:
    """What each experiment is."""
    rows = []
    for experiment in results.study.experiments:
        cells = results.plan.rows[experiment.label]
        shared = dict.fromkeys(cell.label for cell in cells if cell.label != experiment.label)
        seeds = ", ".join(str(cell.seed) for cell in cells)
        rows.append((experiment.label, " ".join(experiment.overrides), seeds, ", ".join(shared)))
    columns = ("experiment", "overrides", "seeds", "has the cells of")
    curves = (
        "figures: mean over seeds of each run's running mean over a tenth of its steps, in the bootstrap "
        "interval of that mean; in brackets the number of seeds"
    )
    return [Table("Experiments", columns, rows, notes=[curves] if results.study.figures else [])]
