"""What is estimated from n graded samples of each problem.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, Eq. 1). majority@k is the expectation
of the same kind for self-consistency (Wang et al. 2022, arXiv 2203.11171): over all draws of k of the n
samples, ties shared evenly.
"""

from collections import Counter
from collections.abc import Sequence
from math import comb

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Probability that at least one of k samples, drawn from `samples` without replacement, is correct.

    Raises:
        ValueError: there are fewer than k samples.
    """
    _check(samples, k)
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def majority_at_k(answers: Sequence[str | None], values: Sequence[float], k: int) -> float:
    """Expected value of the most frequent answer among k of the n samples, drawn without replacement.

    Args:
        answers: n, as they were extracted; None casts no vote. Answers that are written differently are
            different ones.
        values: n, the score of each sample; an answer is worth the mean over its samples.
        k: samples of a draw. Of several answers that are equally frequent each wins as often.

    Raises:
        ValueError: there are fewer than k samples.
    """
    _check(len(answers), k)
    votes = Counter(answer for answer in answers if answer is not None)
    silent = len(answers) - votes.total()
    expected = 0.0
    for answer, count in votes.items():
        worth = sum(v for a, v in zip(answers, values, strict=True) if a == answer) / count
        if worth:
            others = [c for other, c in votes.items() if other != answer]
            expected += worth * _ways_to_win(count, others, silent, k)
    return expected / comb(len(answers), k)


def bootstrap_interval(
    values_of_sets: Sequence[Sequence[float]], weights: Sequence[float]
) -> tuple[float, float]:
    """Percentile interval of a weighted sum of means, problems resampled inside each set.

    Args:
        values_of_sets: the score of each problem, a list a set.
        weights: of the sets' means.

    Returns:
        Lower and upper end at 95 %; the same for the same values.
    """
    generator = np.random.Generator(np.random.Philox(key=0))
    sums = np.zeros(RESAMPLES)
    for values, weight in zip(values_of_sets, weights, strict=True):
        size = len(values)
        counts = generator.multinomial(size, np.full(size, 1 / size), size=RESAMPLES)
        sums += weight * (counts @ np.asarray(values, dtype=np.float64)) / size
    low, high = np.quantile(sums, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _check(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k} and there are {samples} samples; it must lie between 1 and their number")


def _ways_to_win(count: int, others: Sequence[int], silent: int, k: int) -> float:
    """Draws of k in which an answer with `count` votes is the most frequent; a tie of m counts 1 / m."""
    total = 0.0
    for drawn in range(1, min(count, k) + 1):
        ways = {(0, 1): 1}  # (drawn of the others, answers that have the most) -> draws
        for other in others:
            further = Counter()
            for (taken, first), number in ways.items():
                for more in range(min(other, drawn, k - drawn - taken) + 1):
                    further[taken + more, first + (more == drawn)] += number * comb(other, more)
            ways = further
        total += comb(count, drawn) * sum(
            number * comb(silent, k - drawn - taken) / first for (taken, first), number in ways.items()
        )
    return total
