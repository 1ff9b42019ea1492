"""Scores of benchmarks, from the records of their problems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tepo_nemo.evaluation.estimators import bootstrap_interval, majority_at_k, pass_at_k
from tepo_nemo.evaluation.records import ProblemRecord

CORRECT = 0.5  # an answer worth more than this counts as correct in pass@k


@dataclass(frozen=True)
class Score:
    """A mean with its 95 % bootstrap interval over problems, all as fractions."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class BenchmarkScore:
    """What came out of one benchmark."""

    problems: int
    samples: int  # of each problem
    average: Score  # avg@k over all samples
    pass_at: dict[int, float]
    majority_at: dict[int, float]
    unparseable: int  # answers without anything to compare; they are wrong
    timeouts: int  # answers whose grading took too long; they count as wrong
    errors: int  # answers on which the grader failed; they count as wrong
    mean_length: float  # tokens an answer, the stop token included
    truncated: float  # share of the answers that were cut at the length limit


@dataclass(frozen=True)
class Averages:
    """The two ways to one number over several benchmarks."""

    over_generations: Score  # every answer counts the same, as in the paper's Avg
    over_benchmarks: Score  # every benchmark counts the same
    generations: int


def average(records: Sequence[ProblemRecord]) -> float:
    """avg@k: mean over problems of the mean over their answers."""
    return sum(record.average for record in records) / len(records)


def score_benchmark(records: Sequence[ProblemRecord], ks: Sequence[int] = ()) -> BenchmarkScore:
    """The scores of one benchmark.

    Args:
        records: its problems, each with the same number of answers.
        ks: for pass@k and majority@k; the number of samples comes on top where it is more than one.

    Raises:
        ValueError: a k is larger than the number of samples.
    """
    samples = len(records[0].answers)
    assert all(len(record.answers) == samples for record in records)
    ks = sorted({*ks, *([samples] if samples > 1 else [])})
    answers = [answer for record in records for answer in record.answers]
    statuses = [answer.status for answer in answers]
    return BenchmarkScore(
        problems=len(records),
        samples=samples,
        average=_score([records], [1.0]),
        pass_at={k: sum(_pass(record, k) for record in records) / len(records) for k in ks},
        majority_at={k: sum(_majority(record, k) for record in records) / len(records) for k in ks},
        unparseable=statuses.count("unparseable"),
        timeouts=statuses.count("timeout"),
        errors=statuses.count("error"),
        mean_length=sum(answer.length for answer in answers) / len(answers),
        truncated=sum(answer.truncated for answer in answers) / len(answers),
    )


def averages(benchmarks: Mapping[str, Sequence[ProblemRecord]]) -> Averages:
    """Both averages over benchmarks, none of them without a problem."""
    sets = list(benchmarks.values())
    generations = [sum(len(record.answers) for record in records) for records in sets]
    return Averages(
        over_generations=_score(sets, [count / sum(generations) for count in generations]),
        over_benchmarks=_score(sets, [1 / len(sets)] * len(sets)),
        generations=sum(generations),
    )


def _score(sets: Sequence[Sequence[ProblemRecord]], weights: Sequence[float]) -> Score:
    value = sum(weight * average(records) for records, weight in zip(sets, weights, strict=True))
    low, high = bootstrap_interval([[record.average for record in records] for records in sets], weights)
    return Score(value, low, high)


def _pass(record: ProblemRecord, k: int) -> float:
    correct = sum(answer.value > CORRECT for answer in record.answers)
    return pass_at_k(len(record.answers), correct, k)


def _majority(record: ProblemRecord, k: int) -> float:
    votes = [answer.extracted if answer.status == "ok" else None for answer in record.answers]
    return majority_at_k(votes, [answer.value for answer in record.answers], k)
