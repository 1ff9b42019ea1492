"""What has been promised of the operator, and what was measured."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from tepo_nemo.bench.implementations import (
    EAGER,
    FUSED,
    LOGSUMEXP,
    NEMO_ALIGNER,
    OURS,
    OVERWRITING,
    PEERS_WITH_BOTH,
    VERL,
)

_BYTES_A_TOKEN = 64  # of statistics and outputs
_NO_GRADIENT = "no gradient"


class Bound(NamedTuple):
    name: str
    bound: str
    figure: str
    holds: bool


def bounds_of(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bounds on the main tables; a figure that is short of its bound is one too."""
    logits, layer = main_cells(cells)
    bounds = (
        _counts(logits),
        _memory(logits),
        _slope(logits),
        _times(logits),
        _accuracy(logits),
        _layer(layer),
    )
    return [bound._asdict() for part in bounds for bound in part]


def main_cells(cells: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first cell of logits and the first of an output layer."""
    return (
        next(cell for cell in cells if cell["hidden_size"] is None),
        next(cell for cell in cells if cell["hidden_size"] is not None),
    )


def _counts(cell: dict[str, Any]) -> Iterable[Bound]:
    modes = cell["implementations"][OURS]["modes"].values()
    forward, backward, carried = (
        max(figures[key] for figures in modes)
        for key in ("collectives_forward", "collectives_backward", "bytes_per_token_forward")
    )
    yield Bound("collectives forward", "<= 2", f"{forward}", forward <= 2)
    yield Bound("collectives backward", "0", f"{backward}", backward == 0)
    yield Bound("bytes a token and rank", "<= 16", f"{carried:g}", carried <= 16)


def _memory(cell: dict[str, Any]) -> Iterable[Bound]:
    """Of the process where the compiler hides what is allocated, else exactly."""
    chunk = cell["chunk_bytes"] + _BYTES_A_TOKEN * cell["tokens"]
    gradient = 4 * cell["tokens"] * cell["vocab_size"] // cell["tensor_parallel"]
    for name in (OURS, OVERWRITING, EAGER):
        for mode, figures in cell["implementations"][name]["modes"].items():
            keeps_logits = mode != _NO_GRADIENT and name != OVERWRITING
            bound, form = (gradient + chunk, "gradient + chunk") if keeps_logits else (chunk, "chunk")
            peak = peak_bytes(cell, figures)
            yield Bound(f"peak memory, {mode}, {name}", f"<= {bound / 1e6:.1f} MB ({form} + 64 B a token)",
                        f"{peak / 1e6:.1f} MB", peak <= bound)  # fmt: skip


def peak_bytes(cell: dict[str, Any], figures: dict[str, Any]) -> int | None:
    """The exact peak where there is one, else that of the process; None where neither was measured."""
    if figures["peak_tracked_bytes"] is not None:
        return figures["peak_tracked_bytes"]
    return figures.get("peak_process_bytes", {}).get(str(cell["tokens"]))


def slope_bytes(figures: dict[str, Any]) -> float | None:
    """Bytes by which the peak of a process grows with a token; None where one size alone was measured."""
    sizes = sorted((int(tokens), size) for tokens, size in figures.get("peak_process_bytes", {}).items())
    if len(sizes) < 2:
        return None
    (few, low), (many, high) = sizes[0], sizes[-1]
    return (high - low) / (many - few)


def _slope(cell: dict[str, Any]) -> Iterable[Bound]:
    row = 4 * cell["vocab_size"] / cell["tensor_parallel"]
    slope = slope_bytes(cell["implementations"][OURS]["modes"][_NO_GRADIENT])
    yield Bound("growth of the peak, no gradient", f"<= 1 % of the {row / 1e3:.0f} kB of a token's logits",
                f"{slope:.0f} B a token", slope <= row / 100)  # fmt: skip


def _times(cell: dict[str, Any]) -> Iterable[Bound]:
    rows = cell["implementations"]
    for mode in rows[OURS]["modes"]:
        if NEMO_ALIGNER in rows:
            yield _faster(f"time, {mode}: {NEMO_ALIGNER} / {OURS}", 8, rows[NEMO_ALIGNER]["modes"][mode])
        peers = [_against_like(rows, name, mode) for name in PEERS_WITH_BOTH if name in rows]
        if peers:
            name, figures = min(peers, key=lambda peer: peer[1]["time"]["ratio"])
            yield _faster(f"time, {mode}: best peer ({name})", 3, figures)
    yield _faster(f"time, {_NO_GRADIENT}: {LOGSUMEXP} / {OURS}", 2, rows[LOGSUMEXP]["modes"][_NO_GRADIENT])


def _against_like(rows: dict[str, Any], name: str, mode: str) -> tuple[str, dict[str, Any]]:
    """A peer and its times against ours; one that trains in its logits' memory, against ours that does so."""
    figures = rows[name]["modes"][mode]
    if name != VERL or mode == _NO_GRADIENT:
        return f"{name} / {OURS}", figures
    own = rows[OVERWRITING]["modes"][mode]["time"]["ratio"]
    keys = ("ratio", "ratio_low", "ratio_high")
    return f"{name} / {OVERWRITING}", {"time": {key: figures["time"][key] / own for key in keys}}


def _faster(name: str, least: float, figures: dict[str, Any]) -> Bound:
    time = figures["time"]
    interval = f"{time['ratio_low']:.2f} to {time['ratio_high']:.2f}"
    return Bound(name, f">= {least:g}x", f"{time['ratio']:.2f}x ({interval})", time["ratio"] >= least)


def _accuracy(cell: dict[str, Any]) -> Iterable[Bound]:
    for name in (OURS, EAGER):
        modes = cell["implementations"][name]["modes"].values()
        for quantity in ("log-prob", "entropy", "gradient"):
            errors = [
                math.inf if error is None else error
                for figures in modes
                for key, error in figures["errors"].items()
                if key.startswith(quantity)
            ]
            yield Bound(f"error of {quantity}, {name}", "<= 2e-6", f"{max(errors):.1e}", max(errors) <= 2e-6)


def _layer(cell: dict[str, Any]) -> Iterable[Bound]:
    local = cell["vocab_size"] // cell["tensor_parallel"]
    gradients = 4 * cell["hidden_size"] * (local + cell["tokens"])
    logits = 4 * cell["tokens"] * local
    for mode, figures in cell["implementations"][FUSED]["modes"].items():
        peak = figures["peak_process_bytes"][str(cell["tokens"])]
        beyond = peak - (0 if mode == _NO_GRADIENT else gradients)
        yield Bound(
            f"output layer, peak beyond its gradients, {mode}",
            f"< half of the {logits / 1e6:.0f} MB of the logits",
            f"{beyond / 1e6:.1f} MB",
            beyond < logits / 2,
        )
