"""The public sets that can be prepared: where their golds stand, how they are written, what is known of them.

The texts are no part of this package: a set is read from a file that its user has.
"""

from dataclasses import dataclass, field
from typing import Literal

_AOPS = "texts by the Mathematical Association of America, research use"


@dataclass(frozen=True)
class Source:
    """One published set, in all its published forms."""

    name: str
    about: str  # in help texts
    licence: str  # of the public files, and whose the texts are; written to every prompt
    answer_form: Literal["expression", "integer", "numeric"] = "expression"  # what the grader compares
    id_field: str | None = None  # a column that is unique; None: rows are numbered
    id_from_text: bool = False  # rows repeat and are known by a hash of their text
    keep_repeats: Literal["first", "none"] = "first"  # of problems that occur several times with one answer
    published: int | None = None  # problems that the paper's evaluation has
    kept: dict[str, str] = field(default_factory=dict)  # column -> its name in the metadata
    keeps_metadata: bool = False  # all that a row has in `metadata`, which may also say more of its gold


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            "dapo_math_17k",
            "the training set; the raw set's repeats are removed",
            "Apache-2.0 (dataset card)",
            answer_form="integer",
            id_from_text=True,
        ),
        Source("aime24", "30 problems", f"Apache-2.0 and MIT copies; {_AOPS}", "integer", published=30),
        Source("aime25", "30 problems", f"Apache-2.0 copy; {_AOPS}", "integer", published=30),
        Source(
            "amc",  # its `id` is no key: two contests were numbered separately
            "AMC 12 of 2022 and 2023, 83 problems rewritten for integer answers",
            f"Apache-2.0 copy; {_AOPS}",
            "integer",
            published=83,
            kept={"url": "url"},
        ),
        Source(
            "math500",
            "500 problems of MATH",
            "MIT (MATH, PRM800K); the texts are contested (takedown notice of 2025-01-02)",
            id_field="id",
            published=500,
            kept={"level": "level", "subject": "subject"},
        ),
        Source(
            "omni_math",
            "the rule-graded part of Omni-MATH, 2,811 problems without both members of its duplicate pairs",
            "MIT and Apache-2.0 copies; texts from public contests",
            keep_repeats="none",
            published=2811,
            kept={"difficulty": "difficulty", "source": "contest", "domain": "domain"},
        ),
        Source(
            "olympiadbench",
            "675 English problems, text only",
            "MIT (OpenBMB/OlympiadBench)",
            id_field="id",
            published=675,
            kept={name: name for name in ("answer_type", "is_multiple_answer", "unit", "error", "subfield")},
        ),
        Source(
            "minerva",
            "272 problems of MIT courses; the gold is the last box of the solution",
            "CC BY-NC-SA (MIT OpenCourseWare); MIT collection",
            answer_form="numeric",
            published=272,
            kept={"type": "course", "course": "course"},
        ),
        Source(
            "jsonl",
            "problems of your own: id, problem, answer and, optionally, metadata",
            "not stated",
            id_field="id",
            keeps_metadata=True,
        ),
    )
}
"""By name; `jsonl` is any file with the columns of `problems.py`."""
