"""Texts, rewards, and scored batches cut up and joined."""

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import hostile_rewards
from support.rollouts import Response, make_prompt, make_scored
from support.torch_policy import STOP, respell, spell

from tepo_nemo.reward.pool import PoolSettings, RewardPool
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.rollout.batch import RolloutBatch, concatenate_scored
from tepo_nemo.rollout.protocol import Generation
from tepo_nemo.rollout.scoring import Grader


@dataclass
class Ranks:
    """One rank of two; what the main rank sends is what `told` holds elsewhere."""

    is_main: bool = True
    told: Any = None
    sent: list = field(default_factory=list)

    def broadcast_from_main(self, value):
        if not self.is_main:
            assert value is None
            return self.told
        self.sent.append(value)
        return value


@dataclass
class Reward:
    """Remembers what it is asked, and fails on the text 'c'."""

    asked: list = field(default_factory=list)

    def __call__(self, prompt, response_text, gold, metadata):
        self.asked.append((prompt, response_text, gold, metadata))
        if response_text == "c":
            raise ZeroDivisionError
        return RewardResult(len(response_text), "ok")


def rollouts(*responses):
    """(group, tokens, finished) triples; columns past a response hold a token that can be read."""
    width = max(len(tokens) for _, tokens, _ in responses)
    padded = [list(tokens) + [5] * (width - len(tokens)) for _, tokens, _ in responses]
    return RolloutBatch(
        prompts=[make_prompt(number) for number in range(3)],
        groups=torch.tensor([group for group, _, _ in responses]),
        samples=torch.zeros(len(responses), dtype=torch.int64),
        generation=Generation(
            tokens=torch.tensor(padded),
            lengths=torch.tensor([len(tokens) for _, tokens, _ in responses]),
            finished=torch.tensor([finished for _, _, finished in responses]),
            logprobs=torch.zeros(len(responses), width),
        ),
    )


BATCH = rollouts(
    (0, [1, 4, STOP], True),
    (2, [STOP], True),  # stopped at once: the empty text
    (1, [1, 2, 4, 6], False),  # cut at the limit: every token counts
    (0, [4, STOP], True),
)


def test_texts_are_without_the_stop_token_and_whole_where_cut():  # faults 34
    reward = Reward()
    scored = Grader(Ranks(), reward, spell).score([BATCH])
    assert scored.texts == ["ac", "", "abc2", "c"]
    assert [text for _, text, _, _ in reward.asked] == scored.texts


def test_each_response_is_graded_against_its_own_prompt():  # faults 4
    reward = Reward()
    Grader(Ranks(), reward, spell).score([BATCH])
    expected = [(f"prompt p{number}", f"gold p{number}", {}) for number in (0, 2, 1, 0)]
    assert [(prompt, gold, metadata) for prompt, _, gold, metadata in reward.asked] == expected


def test_a_failed_grading_is_not_valid():  # faults 5
    scored = Grader(Ranks(), Reward(), spell).score([BATCH])
    assert scored.rewards.tolist() == [2, 0, 4, 0] and scored.rewards.dtype == torch.float64
    assert scored.valid.tolist() == [True, True, True, False]
    assert scored.results[3].status == "error"


@pytest.mark.parametrize(
    "status, valid", [("ok", True), ("unparseable", True), ("timeout", False), ("error", False)]
)
def test_verdicts_are_valid_and_failures_are_not(status, valid):
    scored = Grader(Ranks(), lambda *_: RewardResult(0.0, status), spell).score([BATCH])
    assert scored.valid.tolist() == [valid] * 4


def test_only_the_main_rank_grades_and_the_others_are_told():
    main = Ranks()
    expected = Grader(main, Reward(), spell).score([BATCH])
    reward = Reward()
    other = Grader(Ranks(is_main=False, told=main.sent[0]), reward, spell).score([BATCH])
    assert reward.asked == []
    assert other.results == expected.results and other.texts == [""] * 4


def test_a_batch_is_graded_while_the_next_one_is_generated():
    """The grader begins with the first batch before the second comes, and cannot end before that."""
    begun, generated = threading.Event(), threading.Event()

    def reward(prompt, response_text, gold, metadata):
        begun.set()
        assert generated.wait(10)
        return RewardResult(len(response_text), "ok")

    def batches():
        yield BATCH
        assert begun.wait(10)
        generated.set()
        yield rollouts((1, [2, 2, STOP], True))

    scored = Grader(Ranks(), reward, spell).score(batches())
    assert scored.rewards.tolist() == [2, 0, 4, 1, 2]
    assert scored.rollouts.groups.tolist() == [0, 2, 1, 0, 3 + 1]
    assert scored.valid.all()


def test_a_reward_that_may_hang_is_graded_by_its_pool():
    settings = PoolSettings(
        workers=2, time_limit_s=2.0, memory_limit_gib=2.0, max_tasks=100, response_tail=3, alarm_fraction=1.0
    )
    grader = Grader(Ranks(), RewardPool(f"{hostile_rewards.__name__}.length", settings), spell)
    try:
        scored = grader.score([BATCH, rollouts((1, [2, 2, STOP], True))])
    finally:
        grader.close()
    assert scored.rewards.tolist() == [2, 0, 3, 1, 2], "the last three characters are graded"
    assert scored.texts[2] == "abc2" and scored.valid.all()


def test_grading_leaves_the_sampled_tokens_alone():
    """faults 22: the tokens spell what other tokens spell, and stay what was sampled."""
    assert respell(spell([1, 2])) == [3]
    batch = rollouts((0, [1, 2, STOP], True), (0, [3, STOP], True))
    scored = Grader(Ranks(), Reward(), spell).score([batch])
    assert scored.texts == ["ab", "ab"]
    assert scored.rollouts.generation.tokens.tolist() == [[1, 2, STOP], [3, STOP, 5]]


# Rows of three groups, interleaved: position says nothing about the group.
SCORED = make_scored(
    [Response(0, 1.0), Response(1, 2.0, 3), Response(0, None), Response(2, 4.0), Response(1, 5.0, 1, True)]
)


def test_groups_are_selected_by_number_and_renumbered_in_the_asked_order():  # faults 4
    part = SCORED.select_groups([2, 0])
    assert [prompt.prompt.id for prompt in part.rollouts.prompts] == ["p2", "p0"]
    assert part.rollouts.groups.tolist() == [0, 1, 1]
    assert part.rollouts.samples.tolist() == [0, 0, 1]
    assert part.texts == ["text 3", "text 0", "text 2"]
    assert part.rewards.tolist() == [4, 1, 0] and part.valid.tolist() == [True, True, False]
    generation = part.rollouts.generation
    assert generation.tokens[:, 0].tolist() == [400, 100, 300]
    assert generation.lengths.tolist() == [2, 2, 2]
    torch.testing.assert_close(generation.logprobs[:, 0], torch.tensor([-0.4, -0.1, -0.3]))


def test_the_last_group_alone():
    part = SCORED.select_groups([1])
    assert part.rollouts.groups.tolist() == [0, 0]
    assert part.rollouts.generation.lengths.tolist() == [3, 1]
    assert part.rollouts.generation.finished.tolist() == [True, False]


def test_joined_batches_number_their_groups_on():
    first = SCORED.select_groups([1])
    second = make_scored([Response(0, 7.0, 4), Response(1, 8.0)], first_prompt=8)
    whole = concatenate_scored([first, second, second])
    assert [prompt.prompt.id for prompt in whole.rollouts.prompts] == ["p1", "p8", "p9", "p8", "p9"]
    assert whole.rollouts.groups.tolist() == [0, 0, 1, 2, 3, 4]
    assert whole.rewards.tolist() == [2, 5, 7, 8, 7, 8]
    assert whole.texts == ["text 1", "text 4", "text 0", "text 1", "text 0", "text 1"]
    assert whole.rollouts.samples.tolist() == [0, 1, 0, 0, 0, 0]
    for row, length, first_token in zip(
        whole.rollouts.generation.tokens, [3, 1, 4, 2, 4, 2], [200, 500, 100, 200, 100, 200], strict=True
    ):
        assert row[:length].tolist() == list(range(first_token, first_token + length))
