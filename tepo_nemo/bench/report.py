"""The tables of a benchmark."""

from collections.abc import Mapping
from typing import Any

from tepo_nemo.bench.bounds import main_cells, slope_bytes
from tepo_nemo.bench.problem import CHECKED, Mode
from tepo_nemo.runs.tables import Table

_COLUMNS = (
    "implementation", "collectives", "bytes a token", "saved MB", "peak MB", "first call s", "s",
    "forward + backward s", "x ours (95 %)", "pairs", "error", "error, hard tokens",
)  # fmt: skip
_LEGEND = (
    "collectives: forward/backward; bytes a token: what a rank puts into them",
    "saved: kept for the backward beyond the inputs",
    "peak: beyond the inputs, of live tensors (nothing that is compiled) / of a process of its own",
    "first call: compiles what is compiled; it is not among the times",
    "s: median over the pairs, of the slowest rank",
    "x ours: median of the ratios of runs that took turns, with its bootstrap interval",
    "error: largest of log-prob / entropy / gradient against float64 over max(1, |value|); "
    f"gradients of the first {CHECKED} tokens; hard tokens: logits of +-1e4, a wide spread, one-hot",
    "floor: by arithmetic; an output layer computes its logits again for the backward",
)


def all_tables(results: Mapping[str, Any]) -> list[Table]:
    return [
        _facts(results),
        *(table for cell in results["cells"] for table in _tables(cell)),
        _bounds(results),
    ]


def main_tables(results: Mapping[str, Any]) -> list[Table]:
    """The first table of logits and the first of an output layer, and what must hold of them."""
    cells = main_cells(results["cells"])
    return [*(table for cell in cells for table in _tables(cell)), _bounds(results)]


def _tables(cell: Mapping[str, Any]) -> list[Table]:
    growth = _growth(cell)
    return [*(_cell(cell, mode) for mode in Mode), *([growth] if growth.rows else [])]


def _bounds(results: Mapping[str, Any]) -> Table:
    rows = [
        (each["name"], each["bound"], each["figure"], "holds" if each["holds"] else "SHORT")
        for each in results["bounds"]
    ]
    return Table("Must hold", ("what", "bound", "figure", ""), rows)


def _facts(results: Mapping[str, Any]) -> Table:
    facts = {**results["machine"], **results["versions"]}
    rows = [(key, str(value)) for key, value in facts.items()]
    return Table("Machine and versions", ("what", ""), rows, notes=_LEGEND)


def _cell(cell: Mapping[str, Any], mode: Mode) -> Table:
    rows = [_floor(cell, mode)]
    for name, row in cell["implementations"].items():
        if mode.value in row["modes"]:
            rows.append(_row(name, row["modes"][mode.value], cell["tokens"]))
    rows += [(name, *[""] * (len(_COLUMNS) - 2), reason) for name, reason in cell["absent"].items()]
    load = " -> ".join(f"{value:.2f}" for value in cell["load_average"])
    first = mode is Mode.NO_GRADIENT
    notes = [f"{name}: {row['note']}" for name, row in cell["implementations"].items()] if first else []
    return Table(f"{_title(cell)}: {mode.value} (load average {load})", _COLUMNS, rows, notes)


def _title(cell: Mapping[str, Any]) -> str:
    family = (
        "logits given" if cell["hidden_size"] is None else f"output layer, hidden size {cell['hidden_size']}"
    )
    return f"{family}, TP {cell['tensor_parallel']}, V {cell['vocab_size']}, N {cell['tokens']}"


def _floor(cell: Mapping[str, Any], mode: Mode) -> tuple[str, ...]:
    """By arithmetic. Logits are read once forward, and read and written once backward, 4 bytes each."""
    split = cell["tensor_parallel"] > 1
    elements = cell["tokens"] * cell["vocab_size"] // cell["tensor_parallel"]
    moved = "moves 12 B a logit" if mode.trains else "moves 4 B a logit"
    saved, peak = 8 * cell["tokens"], 8 * cell["tokens"]  # two numbers a token; the gradient over the logits
    if cell["hidden_size"] is not None:
        products = 8 if mode.trains else 2
        moved = f"{products * elements * cell['hidden_size'] / 1e9:.0f} GFLOP"
        gradients = cell["hidden_size"] * (cell["vocab_size"] // cell["tensor_parallel"] + cell["tokens"])
        peak += 4 * gradients if mode.trains else 0
    return (
        "floor", f"{int(split)}/0", f"{16 * split}", _mega(saved if mode.trains else 0), _mega(peak),
        "", "", moved, "", "", "", "",
    )  # fmt: skip


def _row(name: str, figures: Mapping[str, Any], tokens: int) -> tuple[str, ...]:
    time, errors = figures["time"], figures["errors"]
    process = figures.get("peak_process_bytes", {}).get(str(tokens))
    interval = (
        f"{time['ratio']:.2f} ({time['ratio_low']:.2f} to {time['ratio_high']:.2f})"
        if "ratio" in time
        else "1"
    )
    return (
        name,
        f"{figures['collectives_forward']}/{figures['collectives_backward']}",
        f"{figures['bytes_per_token_forward'] + figures['bytes_per_token_backward']:,.0f}",
        _mega(figures["saved_bytes"]),
        f"{_mega(figures['peak_tracked_bytes'])} / {_mega(process)}",
        f"{time['first_call_s']:.2f}",
        _seconds(time.get("total_s")),
        f"{_seconds(time.get('forward_s'))} + {_seconds(time.get('backward_s'))}",
        interval,
        str(time["pairs"]),
        _errors(errors, ""),
        _errors(errors, ", hard tokens"),
    )


def _growth(cell: Mapping[str, Any]) -> Table:
    rows = []
    for name, row in cell["implementations"].items():
        figures = row["modes"][Mode.NO_GRADIENT.value]
        if (slope := slope_bytes(figures)) is not None:
            local = cell["vocab_size"] / cell["tensor_parallel"]
            peaks = ", ".join(
                f"{_mega(size)} at {tokens}" for tokens, size in figures["peak_process_bytes"].items()
            )
            rows.append((name, peaks, f"{slope:,.0f}", f"{slope / (4 * local):.3f}"))
    columns = ("implementation", "peak MB at N tokens", "slope, B a token", "in rows of fp32 logits")
    return Table(f"{_title(cell)}: growth of the peak without gradient", columns, rows)


def _errors(errors: Mapping[str, float | None], part: str) -> str:
    names = [name + part for name in ("log-prob", "entropy", "gradient")]
    if not errors.keys() & set(names):
        return ""
    return " / ".join(_error(errors[name]) if name in errors else "-" for name in names)


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.0e}"


def _mega(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:,.1f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
