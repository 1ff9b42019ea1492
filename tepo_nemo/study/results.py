"""The figures of a study as plain data: `report.json`, and what its tables and pictures are made from."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tepo_nemo.data.prompts import load_prompts
from tepo_nemo.study.measures import MEASURES, Criteria, Result, Value, measure, read_result
from tepo_nemo.study.plan import Cell, Plan
from tepo_nemo.study.schema import Claim, Study
from tepo_nemo.study.statistics import Summary, compare, mean_band, summarize

MEAN_OF_BENCHMARKS = "mean of benchmarks"
MEAN_OF_ANSWERS = "mean of all answers"


@dataclass(frozen=True)
class Results:
    """What the finished cells of a study have left."""

    study: Study
    plan: Plan
    of_cell: dict[Cell, Result]

    @classmethod
    def read(cls, study: Study, plan: Plan) -> "Results":
        """Raises UserError where a file is broken, or a finished cell has another configuration."""
        return cls(study, plan, {cell: read_result(cell.run) for cell in plan.finished()})

    @property
    def criteria(self) -> Criteria:
        return Criteria(self.study.reward_threshold, self.study.window)

    @property
    def missing(self) -> list[Cell]:
        """Cells that are not finished."""
        return [cell for cell in self.plan.cells() if cell not in self.of_cell]

    def of(self, label: str) -> list[Result]:
        """Of the finished cells of an experiment, in the order of its seeds."""
        return [self.of_cell[cell] for cell in self.plan.rows[label] if cell in self.of_cell]

    def values(self, label: str, name: str) -> list[Value]:
        """A measure of every finished cell of an experiment."""
        return [measure(result, name, self.criteria) for result in self.of(label)]

    def curves(self, label: str, metric: str) -> np.ndarray:
        """[finished cells, steps] of an experiment; NaN where a run has no value at a step."""
        columns = [result.columns for result in self.of(label)]
        steps = max((len(column["step"]) for column in columns), default=0)
        curves = np.full((len(columns), steps), np.nan)
        for row, column in zip(curves, columns, strict=True):
            if metric in column:
                row[: len(column[metric])] = column[metric]
        return curves

    @cached_property
    def benchmarks(self) -> dict[str, int]:
        """Benchmark -> answers, of the study's first cell: problems x samples."""
        evaluation = self.plan.cells()[0].config.data.evaluation
        return {each.name: len(load_prompts(each.path)) * each.samples for each in evaluation}

    def accuracies(self, label: str, *, before: bool = False) -> dict[str, Summary]:
        """avg@k of each benchmark and, where there are several, both means over them."""
        scores = [result.before if before else result.after for result in self.of(label)]
        columns = {name: [Value(each.get(name, math.nan)) for each in scores] for name in self.benchmarks}
        if len(self.benchmarks) > 1:
            answers = list(self.benchmarks.values())
            rows = [[each.get(name, math.nan) for name in self.benchmarks] for each in scores]
            columns[MEAN_OF_BENCHMARKS] = [Value(float(np.mean(row))) for row in rows]
            columns[MEAN_OF_ANSWERS] = [Value(float(np.average(row, weights=answers))) for row in rows]
        return {name: summarize(values) for name, values in columns.items()}


def to_data(results: Results, output: Path) -> dict[str, Any]:
    """Everything that the report says, and the numbers of every cell."""
    study = results.study
    return {
        "study": study.name,
        "base": study.base,
        "jobs": study.jobs,
        "reward_threshold": study.reward_threshold,
        "window": study.window,
        "cells": {
            "all": len(results.plan.cells()),
            "finished": len(results.of_cell),
            "missing": [cell.name for cell in results.missing],
        },
        "experiments": {each.label: _experiment(results, each.label, output) for each in study.experiments},
        "claims": [claim_data(results, claim) for claim in study.claims],
        "curves": {
            label: {metric: _curve(results.curves(label, metric)) for metric in dict.fromkeys(metrics)}
            for label, metrics in _curves_of(study)
        },
    }


def _experiment(results: Results, label: str, output: Path) -> dict[str, Any]:
    overrides = next(each.overrides for each in results.study.experiments if each.label == label)
    return {
        "overrides": overrides,
        "cells": [
            {"seed": cell.seed, "run": str(cell.run.path.relative_to(output.absolute()))}
            | _cell(results, cell)
            for cell in results.plan.rows[label]
        ],
        "accuracy": {name: _summary(each) for name, each in results.accuracies(label).items()},
        "accuracy_before": {
            name: _summary(each) for name, each in results.accuracies(label, before=True).items()
        },
        "measures": {name: _summary(summarize(results.values(label, name))) for name in MEASURES},
    }


def _cell(results: Results, cell: Cell) -> dict[str, Any]:
    if cell not in results.of_cell:
        return {"finished": False}
    result = results.of_cell[cell]
    values = {name: measure(result, name, results.criteria) for name in MEASURES}
    return {
        "finished": True,
        "before": result.before,
        "after": result.after,
        "measures": {name: value.number for name, value in values.items()},
        "censored": [name for name, value in values.items() if value.censored],
    }


def _summary(summary: Summary) -> dict[str, Any]:
    return asdict(summary)


def claim_data(results: Results, claim: Claim) -> dict[str, Any]:
    """A claim, what was found, and the verdict."""
    first = results.values(claim.of, claim.measure)
    second = None if claim.than is None else results.values(claim.than, claim.measure)
    return claim.model_dump() | asdict(compare(first, second, claim.expect))


def _curves_of(study: Study) -> Iterator[tuple[str, Sequence[str]]]:
    """The reward of every experiment, and what else figures draw of it."""
    for label in study.labels:
        drawn = [metric for figure in study.figures if label in figure.labels for metric in figure.metrics]
        yield label, ["reward/mean", *drawn]


def _curve(curves: np.ndarray) -> dict[str, list[float]]:
    """Over the seeds, step by step, to six digits."""
    low, high = mean_band(curves)
    counts = np.isfinite(curves).sum(axis=0)
    mean, deviation = np.full((2, curves.shape[1]), np.nan)
    some, several = counts > 0, counts > 1
    mean[some] = np.nanmean(curves[:, some], axis=0)
    deviation[several] = np.nanstd(curves[:, several], axis=0, ddof=1)
    columns = {"mean": mean, "deviation": deviation, "low": low, "high": high}
    return {name: [float(f"{value:.6g}") for value in column] for name, column in columns.items()}
