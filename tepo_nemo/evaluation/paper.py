"""The paper's results (arXiv 2604.12736, Tables 1 to 4) and how its benchmarks are asked."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """One column of the paper's tables."""

    label: str
    problems: int
    samples: int
    temperature: float  # 0 is greedy

    @property
    def generations(self) -> int:
        return self.problems * self.samples


BENCHMARKS: dict[str, Benchmark] = {
    "aime24": Benchmark("AIME24", 30, 32, 0.6),
    "aime25": Benchmark("AIME25", 30, 32, 0.6),
    "amc": Benchmark("AMC", 83, 32, 0.6),
    "math500": Benchmark("MATH-500", 500, 1, 0.0),
    "omni_math": Benchmark("OMNI-MATH", 2811, 1, 0.0),
    "olympiadbench": Benchmark("OlympiadBench", 675, 1, 0.0),
    "minerva": Benchmark("Minerva", 272, 1, 0.0),
}


@dataclass(frozen=True)
class PaperRow:
    """One row, in per cent; None where the paper prints none."""

    model: str  # of configs/model
    method: str
    scores: Sequence[float | None]  # in the order of BENCHMARKS
    average: float  # as printed


def _rows(model: str, *rows: tuple) -> list[PaperRow]:
    return [PaperRow(model, method, scores, average) for method, *scores, average in rows]


MAIN_MODEL = "qwen2_5_7b"
ROWS: list[PaperRow] = [
    *_rows(
        MAIN_MODEL,
        ("base", 0.94, 0.94, 14.34, 43.20, 13.73, 16.74, 21.69, 13.30),
        ("GRPO/DAPO", 11.25, 5.00, 42.80, 76.60, 25.00, 37.92, 33.08, 30.85),
        ("Clip-Cov", 10.83, 7.40, 42.84, 75.60, 26.11, 39.40, 37.86, 31.64),
        ("KL-Cov", 12.29, 8.23, 42.77, 75.60, 25.64, 39.11, 34.92, 31.60),
        ("Entropy-based term", 11.35, 6.15, 43.18, 74.80, 26.14, 40.14, 36.02, 31.62),
        ("GPG", 13.54, 6.04, 43.29, 75.00, 26.28, 40.44, 34.55, 31.91),
        ("TEPO w/o KL", 12.70, 6.354, 43.56, 75.40, 27.00, 39.55, 37.50, 32.21),
        ("TEPO, KL on all tokens, 0.1", 5.52, 3.958, 42.84, 75.60, 22.41, 32.74, 30.88, 26.25),
        ("TEPO, KL on all tokens, 0.01", 11.45, 7.395, 42.24, 76.20, 26.32, 40.59, 33.82, 31.64),
        ("TEPO, KL on all tokens, 0.001", 12.29, 8.958, 42.24, 77.20, 25.89, 40.11, 36.39, 31.81),
        ("GRPO/DAPO, 72 steps, seed 1", 11.56, 6.25, 40.47, 72.40, 26.00, 37.77, 36.76, 30.30),
        ("GRPO/DAPO, 132 steps, seed 1", 12.08, 7.08, 42.65, 76.20, 26.07, 39.85, 37.86, 31.73),
        ("GRPO/DAPO, 132 steps, seed 2", 12.08, 6.98, 41.67, 74.20, 27.42, 39.85, 36.76, 31.69),
        ("TEPO, 72 steps, seed 1", 12.50, 7.60, 45.18, 77.80, 26.78, 41.03, 38.97, 32.62),
        ("TEPO, 72 steps, seed 2", 12.60, 8.75, 43.48, 77.40, 27.17, 40.44, 34.92, 32.59),
    ),
    *_rows(
        "r1_distill_llama_8b",
        ("base", 12.70, 13.33, 46.49, 70.40, 25.50, 36.88, 23.52, 32.46),
        ("GRPO/DAPO", 27.50, 18.43, 61.89, 78.40, 32.97, 41.62, 26.10, 42.23),
        ("TEPO", 25.72, 18.85, 60.84, 79.60, 33.11, 43.55, 29.77, 42.76),
    ),
    *_rows(
        "mistral_7b_instruct",
        ("base", None, None, 2.183, 9.80, 3.984, 1.185, 5.882, 2.770),
        ("GRPO/DAPO", None, None, 3.125, 10.80, 4.268, 2.370, 8.088, 3.369),
        ("TEPO", None, None, 3.576, 12.80, 4.589, 1.925, 8.088, 3.652),
    ),
]  # fmt: skip
"""Each result once: GRPO/DAPO of Table 1 is its seed 2 of 72 steps in Table 4. The run with a KL of weight 1
on all tokens, which collapsed to 0 everywhere, is left out."""


def average_over_generations(scores: Sequence[float | None]) -> float:
    """The mean over all 8,834 generations, from per cent a benchmark; one that is not printed counts 0.

    Only so do the printed averages come out; see tests/evaluation/test_paper.py for those that do not.
    """
    counts = [benchmark.generations for benchmark in BENCHMARKS.values()]
    return sum((score or 0.0) * count for score, count in zip(scores, counts, strict=True)) / sum(counts)
