"""Filling a step with groups that have something to teach."""

from collections import Counter

import pytest
import torch
from support.rollouts import Response, make_scored
from support.tiny_run import make_collector

from tepo_nemo.data.order import PromptOrder
from tepo_nemo.data.prompts import Prompt
from tepo_nemo.reward.result import RewardResult
from tepo_nemo.rollout.batch import TokenizedPrompt
from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.rollout.sampling import row_keys
from tepo_nemo.training.collect import has_spread, trained_lengths, whole_mini_batches

STEP = 5


class Host:
    """Answers each row with tokens that tell its sample number, and remembers what it was asked."""

    temperature = 1.0
    is_main = True

    def __init__(self):
        self.requests: list[GenerationRequest] = []

    def infer(self, request):
        self.requests.append(request)
        rows = len(request)
        # The number of generated batches sets the width, so that joined batches differ in it.
        width = 1 + len(self.requests)
        tokens = 1 + torch.tensor(request.sample_indices)[:, None] % 2 + torch.zeros(width).long()
        return Generation(
            tokens, torch.full((rows,), width), torch.zeros(rows).bool(), torch.zeros(rows, width)
        )

    def broadcast_from_main(self, value):
        return value


def make_prompts(kinds):
    """One prompt a kind, which is its gold: what `reward` makes of its responses."""
    return [
        TokenizedPrompt(Prompt(f"p{number}", f"prompt {number}", kind), [number])
        for number, kind in enumerate(kinds)
    ]


def reward(prompt, response_text, gold, metadata):
    """By kind: odd samples are right, all are, none is, the right ones cannot be graded, nothing can."""
    right = response_text.startswith("b")
    if gold == "broken" or (gold == "flaky" and right):
        return RewardResult(1.0, "timeout")
    return RewardResult({"mixed": float(right), "flaky": 0.0, "solved": 1.0, "hopeless": 0.0}[gold], "ok")


def collect(kinds, consumed=0, host=None, **changes):
    host = host or Host()
    settings = dict(dynamic_sampling=True, responses_per_prompt=2)
    collector = make_collector(host, reward, make_prompts(kinds), **settings | changes)
    return collector.collect(STEP, consumed), host


def ids(scored):
    return [prompt.prompt.id for prompt in scored.rollouts.prompts]


def expected_ids(n, consumed, count, seed=1):
    return [f"p{index}" for index in PromptOrder(n, seed).take(consumed, count)]


# --- dynamic sampling ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["solved", "hopeless", "flaky", "broken"])
@pytest.mark.parametrize("batches", [1, 3])
def test_prompts_without_spread_end_after_the_last_allowed_batch(kind, batches):  # faults 29
    """Failed gradings do not vote, so one right answer that cannot be graded makes no spread (faults 5)."""
    collected, host = collect([kind] * 10, max_generation_batches=batches)
    assert collected.kept is None
    assert len(host.requests) == batches
    assert collected.consumed_prompts == 4 * batches
    assert len(collected.generated.rollouts) == 4 * 2 * batches
    assert ids(collected.generated) == expected_ids(10, 0, 4 * batches)


def test_a_full_first_batch_is_enough():
    collected, host = collect(["mixed"] * 10)
    assert len(host.requests) == 1 and collected.consumed_prompts == 4
    assert ids(collected.kept) == ids(collected.generated) == expected_ids(10, 0, 4)


def kinds_in_order(*kinds):
    """Kinds such that the order of prompts meets them as given; ten prompts, the rest solved."""
    order = PromptOrder(10, 1).take(0, 10)
    placed = dict(zip(order, kinds, strict=False))
    return [placed.get(number, "solved") for number in range(10)]


def test_groups_of_several_batches_are_numbered_on_and_the_surplus_is_dropped():
    """4 wanted; the first batch has 2 worth it, the second 1, the third 2 of which one is too many."""
    kinds = kinds_in_order(
        "mixed", "solved", "mixed", "solved", "solved", "solved", "solved", "mixed", "mixed", "mixed"
    )
    collected, host = collect(kinds)
    order = expected_ids(10, 0, 12)
    assert len(host.requests) == 3 and collected.consumed_prompts == 12
    assert ids(collected.generated) == order
    assert collected.generated.rollouts.groups.tolist() == [group for group in range(12) for _ in range(2)]
    kept = collected.kept
    assert ids(kept) == [order[0], order[2], order[7], order[8]]
    assert kept.rollouts.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert kept.rewards.tolist() == [0, 1] * 4
    # Every row still has the texts, tokens and lengths of its own group.
    assert kept.rollouts.generation.lengths.tolist() == [2, 2, 2, 2, 3, 3, 4, 4]
    assert kept.texts == ["aa", "bb", "aa", "bb", "aaa", "bbb", "aaaa", "bbbb"]
    for tokens, text in zip(kept.rollouts.generation.tokens.tolist(), kept.texts, strict=True):
        assert tokens[: len(text)] == [1 if letter == "a" else 2 for letter in text]


def test_a_step_that_stays_partly_filled_keeps_what_there_is():  # faults 29
    collected, host = collect(kinds_in_order("solved", "mixed"), max_generation_batches=2)
    assert len(host.requests) == 2 and collected.consumed_prompts == 8
    assert ids(collected.kept) == [expected_ids(10, 0, 2)[1]]


def test_without_dynamic_sampling_one_batch_is_kept_whole():
    collected, host = collect(["solved", "mixed", "broken", "hopeless"], dynamic_sampling=False)
    assert len(host.requests) == 1 and collected.consumed_prompts == 4
    assert ids(collected.kept) == ids(collected.generated) == expected_ids(4, 0, 4)
    assert collected.kept.rollouts.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


# --- cursor and noise ----------------------------------------------------------------------------


def test_a_run_that_stops_after_every_step_takes_the_prompts_of_an_uninterrupted_one():  # faults 27
    """6 prompts, 2 a step, two epochs; a new process knows the cursor alone."""
    taken, consumed = [], 0
    for _ in range(6):
        collected, _ = collect(["mixed"] * 6, consumed, prompts_per_step=2)
        consumed = collected.consumed_prompts
        taken += ids(collected.generated)
    assert consumed == 12
    assert taken == expected_ids(6, 0, 12)
    assert set(Counter(taken[:6]).values()) == set(Counter(taken[6:]).values()) == {1}


def test_a_batch_over_the_edge_of_an_epoch():  # faults 27
    collected, _ = collect(["mixed"] * 6, consumed=4)
    assert ids(collected.generated) == expected_ids(6, 4, 4)
    assert collected.consumed_prompts == 8


def test_dropped_prompts_are_consumed():
    first, _ = collect(["solved"] * 6, prompts_per_step=2, max_generation_batches=2)
    second, _ = collect(["solved"] * 6, first.consumed_prompts, prompts_per_step=2, max_generation_batches=1)
    assert ids(second.generated) == expected_ids(6, 4, 2)


def noise(host):
    """Keys of all rows that a step asked for, a list a request."""
    return [
        row_keys(request.seed, request.prompt_keys, request.sample_indices, torch.device("cpu")).tolist()
        for request in host.requests
    ]


def test_a_prompt_that_comes_again_in_a_step_gets_other_noise():
    """One prompt, 4 a batch, 3 batches: 24 responses, none sampled as another one."""
    _, host = collect(["solved"])
    keys = [key for request in noise(host) for key in request]
    assert len(keys) == len(set(keys)) == 24


def test_noise_is_a_function_of_seed_step_and_prompt():
    hosts = {}
    for seed, step in [(1, STEP), (1, STEP + 1), (2, STEP)]:
        hosts[seed, step] = Host()
        collector = make_collector(hosts[seed, step], reward, make_prompts(["mixed"]), seed=seed)
        collector.collect(step, 0)
    again = Host()
    make_collector(again, reward, make_prompts(["mixed"])).collect(STEP, 100)
    assert noise(again) == noise(hosts[1, STEP])
    keys = [key for host in hosts.values() for request in noise(host) for key in request]
    assert len(keys) == len(set(keys))


# --- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1.0, 1.0, 0.0], True),
        ([0.0, 0.0, 0.0], False),
        ([0.1, 0.1, 0.1], False),
        ([-1.0, 0.0], True),
        ([None, None, None], False),
        ([1.0, None], False),  # faults 3: one that votes
        ([1.0, 1.0, None], False),  # faults 5: the failed one is worth 0 and does not vote
        ([0.0, 1.0, None], True),
    ],
)
def test_spread(rewards, expected):
    rows = [Response(1, reward) for reward in rewards]
    scored = make_scored([Response(0, 1.0), *rows, Response(0, 0.0)])  # the group around it does not matter
    assert has_spread(scored, 1) == expected


def test_spread_is_that_of_the_group_alone():  # faults 4
    """Rewards 1, 0, 1, 0 of prompts 0, 1, 0, 1: each group is of one mind."""
    scored = make_scored([Response(0, 1.0), Response(1, 0.0), Response(0, 1.0), Response(1, 0.0)])
    assert not has_spread(scored, 0) and not has_spread(scored, 1)


@pytest.mark.parametrize(
    "groups, per_update, usable", [(8, 2, 8), (7, 2, 6), (3, 2, 2), (2, 2, 2), (1, 2, 1), (3, 4, 3)]
)
def test_whole_mini_batches_or_what_there_is_of_the_first(groups, per_update, usable):
    scored = make_scored([Response(group, float(group)) for group in range(groups) for _ in range(2)])
    part = whole_mini_batches(scored, per_update)
    assert ids(part) == [f"p{number}" for number in range(usable)]
    assert part.rewards.tolist() == [float(group) for group in range(usable) for _ in range(2)]


def test_responses_whose_grading_failed_are_not_trained_on():  # faults 8
    scored = make_scored([Response(0, 1.0, 3), Response(0, None, 4), Response(1, 0.0, 1, True)])
    assert trained_lengths(scored).tolist() == [3, 0, 1]
