"""When a rollout engine is too far from the policy, and what the message says."""

import logging
from dataclasses import replace

import pytest
import torch

from tepo_nemo.rollout.check import Gap, GapLimits, check_samples, judge, same_answers
from tepo_nemo.rollout.protocol import Generation, RolloutError

LIMITS = GapLimits(warn_gap=0.03, stop_gap=0.1, warn_error=1.05, stop_error=1.5)
SMALL = Gap(mean=0.01, error=1.01, early=0.01, late=0.01, largest=0.2, row=3, column=7, token=11)


def judged(gap: Gap) -> None:
    judge(gap, LIMITS, step=1, engine="the engine", temperature=0.6)


@pytest.mark.parametrize("gap", [SMALL, replace(SMALL, mean=0.03, error=1.05, largest=9.0)])
def test_nothing_is_said_up_to_the_limits(gap: Gap, caplog: pytest.LogCaptureFixture) -> None:
    judged(gap)
    assert caplog.records == []


@pytest.mark.parametrize("change", [{"mean": 0.05}, {"error": 1.2}, {"mean": 0.1, "error": 1.5}])
def test_a_warning_first(change: dict[str, float], caplog: pytest.LogCaptureFixture) -> None:
    judged(replace(SMALL, **change))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    "change", [{"mean": 0.11}, {"error": 1.6}, {"mean": torch.nan, "error": torch.nan}, {"mean": torch.inf}]
)
def test_then_the_end(change: dict[str, float]) -> None:
    with pytest.raises(RolloutError) as caught:
        judged(replace(SMALL, **change))
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "step 1: the engine and the trainer differ", "token 7 (id 11) of response 3", "temperature than 0.6",
        "weights of now", "qkv_bias", "scale_positional_embedding", "vocabulary",
    ):  # fmt: skip
        assert part in message


def generation(rows: list[list[int]], probability: float) -> Generation:
    """Responses whose tokens all have the given probability."""
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return Generation(
        tokens,
        torch.tensor([len(row) for row in rows]),
        torch.ones(len(rows), dtype=torch.bool),
        torch.full(tokens.shape, probability).log(),
    )


def test_equal_samples_beyond_chance() -> None:
    """16 groups of 4 equal responses of five tokens: by chance 48 x 0.25^5 = 0.05 rows at most."""
    rows = [[group, 1, 2, 3, 4] for group in range(16) for _ in range(4)]
    groups = torch.arange(16).repeat_interleave(4)
    with pytest.raises(RolloutError, match="48 of 64 responses repeat an earlier one"):
        check_samples(groups, generation(rows, 0.25))


@pytest.mark.parametrize("rows", [[[1]] * 64, [[token % 2] for token in range(64)]])
def test_equal_samples_by_chance(rows: list[list[int]]) -> None:
    """A policy that is sure of its answer, or has two of them, repeats itself."""
    probability = 1.0 if rows[0] == rows[1] else 0.5
    check_samples(torch.arange(16).repeat_interleave(4), generation(rows, probability))


def test_equal_answers_to_different_prompts_are_nobodys_fault() -> None:
    check_samples(torch.arange(64), generation([[5, 6, 7, 8]] * 64, 0.01))


def test_responses_that_are_none_do_not_repeat_each_other() -> None:
    answers = replace(generation([[5, 6, 7, 8]] * 64, 0.01), lengths=torch.zeros(64, dtype=torch.int64))
    check_samples(torch.zeros(64, dtype=torch.int64), answers)


def test_same_answers_are_equal_to_the_bit() -> None:
    answers = generation([[1, 2], [3]], 0.3)
    assert same_answers(answers, generation([[1, 2], [3]], 0.3))
    moved = answers.logprobs.clone()
    moved[0, 0] = torch.nextafter(moved[0, 0], torch.tensor(0.0))
    assert not same_answers(answers, replace(answers, logprobs=moved))
    assert not same_answers(answers, generation([[1, 2], [4]], 0.3))
