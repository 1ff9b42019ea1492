"""The selection over a mini-batch: of scores given by hand, and of whole runs, sorted in plain Python."""

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from rollout.test_noise import GOLDEN, reference_key, reference_mix
from support.tiny_run import WatchedPolicy, make_objective, make_run, world_group
from support.torch_policy import TorchPolicy
from training.test_statistics import trained_values

from tepo_nemo.objectives import MinibatchStatistics, Objective
from tepo_nemo.rollout.sampling import stream_seed
from tepo_nemo.training.balance import MicroBatchLimits
from tepo_nemo.training.batch import TokenStatistics, TrainBatch
from tepo_nemo.training.minibatch import build_mini_batches
from tepo_nemo.training.selection import with_selection

INF = float("inf")


class Given(Objective):
    """The log-probabilities are the scores."""

    needs_selection: ClassVar[bool] = True
    count: int

    def selection_scores(self, tokens, statistics, draws):
        return tokens.logprobs

    def selection_count(self, tokens):
        return self.count

    def __call__(self, tokens, totals):
        raise NotImplementedError


# Scores of each response's tokens. All prompts have two tokens.
DISTINCT = [[0.1, 0.7, 0.3], [0.9], [0.2, 0.8], [0.4, 0.5, 0.6]]
TIED = [[1.0, 1.0], [2.0, 1.0], [1.0], [2.0, 2.0]]
FEW = [[-INF, -INF], [0.3, -INF], [-INF], [-INF, 0.1]]
EMPTY = [[], [0.5, 0.6], [], []]  # the second data-parallel rank has no token

CASES = [
    (DISTINCT, 1, {(1, 0)}),
    (DISTINCT, 3, {(1, 0), (2, 1), (0, 1)}),
    (DISTINCT, 9, {(row, place) for row, scores in enumerate(DISTINCT) for place in range(len(scores))}),
    (TIED, 2, {(1, 0), (3, 0)}),
    (TIED, 4, {(1, 0), (3, 0), (3, 1), (0, 0)}),
    (TIED, 6, {(1, 0), (3, 0), (3, 1), (0, 0), (0, 1), (1, 1)}),
    (FEW, 1, {(1, 0)}),
    (FEW, 5, {(1, 0), (3, 1)}),  # fewer candidates than are wanted
    ([[-INF], [-INF], [-INF], [-INF]], 2, set()),
    (EMPTY, 1, {(1, 1)}),
    ([[], [], [], []], 1, set()),
]


def selected(scores, count, micro_batch_size, objective=Given, seed=0) -> set[tuple[int, int]]:
    """(response, token) of what this rank holds of the selection."""
    policy = TorchPolicy(objective(count=count), group=world_group())
    lengths = torch.tensor([len(row) for row in scores])
    batch = TrainBatch(
        [[1, 2]] * 4, torch.ones(4, 10, dtype=torch.int64), lengths, torch.arange(4), torch.ones(4)
    )
    (mini_batch,) = build_mini_batches(
        batch,
        responses_per_update=4,
        limits=MicroBatchLimits(micro_batch_size, None, 1),
        attention_length=100,
        data_parallel_rank=policy.data_parallel_rank,
        data_parallel_size=policy.data_parallel_size,
        max_response_length=10,
    )
    means = MinibatchStatistics(torch.zeros(()), torch.zeros(()))
    mini_batch = replace(mini_batch, totals=replace(mini_batch.totals, statistics=means))
    current = []
    for micro in mini_batch.micro_batches:
        values = torch.full(micro.mask.shape, 100.0)  # what is no token is never selected, whatever its score
        for place, row in enumerate(micro.rows.tolist()):
            if row >= 0:
                values[place, micro.mask[place]] = torch.tensor(scores[row])
        current.append(TokenStatistics(values, values))
    marked = with_selection(policy, policy.objective, mini_batch, current, seed)
    return {
        (int(micro.rows[place]), position - 1)
        for micro in marked.micro_batches
        for place, position in micro.selected.nonzero().tolist()
    }


def all_selected(rank, world_size):
    return [[selected(scores, count, size) for scores, count, _ in CASES] for size in (1, 2, 4)]


def test_the_highest_scores_are_selected_and_the_earlier_of_equals():
    for of_size in all_selected(0, 1):
        assert of_size == [expected for _, _, expected in CASES]


def test_ranks_select_together_what_one_selects(worlds):
    """Among them a rank without a token, ties over ranks, and fewer candidates than are wanted."""
    first, second = worlds(2).run(all_selected)
    for of_first, of_second in zip(first, second, strict=True):
        assert not any(one & other for one, other in zip(of_first, of_second, strict=True))
        assert [one | other for one, other in zip(of_first, of_second, strict=True)] == [
            expected for _, _, expected in CASES
        ]


# --- whole runs ----------------------------------------------------------------------------------

# The tiny model's covariances are small, and so are its mini-batches.
METHODS = {
    "clip_cov": dict(covariance_low=0.05, covariance_high=2.0, selected_fraction=0.1),
    "kl_cov": dict(selected_fraction=0.1),
}
TEMPERATURE, SEED = 0.7, 1


def watched(rank, world_size, name):
    """Per update: (row, position, advantage, log-prob now, ratio, selected) of this rank's trained tokens."""
    policy = WatchedPolicy(
        make_objective(name, **METHODS[name]), temperature=TEMPERATURE, group=world_group()
    )
    make_run(policy, max_steps=2, micro_batch_size=1, seed=SEED).trainer.fit()
    updates = []
    for before, mini_batch, _ in policy.updates:
        tokens = trained_values(before, mini_batch)
        places = [
            (
                row,
                position,
                0.0 if micro.old is None else micro.old.logprobs[place, position].item(),
                micro.selected[place, position].item(),
            )
            for micro in mini_batch.micro_batches
            for place, row in enumerate(micro.rows.tolist())
            for position in micro.mask[place].nonzero().flatten().tolist()
        ]
        first = mini_batch.micro_batches[0].old is None
        updates.append(
            [
                (row, position, advantage, logprob, 0.0 if first else logprob - old, chosen)
                for (_, advantage, logprob), (row, position, old, chosen) in zip(tokens, places, strict=True)
            ]
        )
    return updates, policy.forward_passes


def expected_selection(name, tokens, step):
    """(row, position) by the formulas of the two methods, over the tokens of all ranks."""
    mean_a = sum(a for _, _, a, _, _, _ in tokens) / len(tokens)
    mean_logp = sum(logp for _, _, _, logp, _, _ in tokens) / len(tokens)
    options = METHODS[name]
    scores = []
    for row, position, a, logp, d, _ in tokens:
        covariance = (a - mean_a) * (logp - mean_logp)
        if name == "kl_cov":
            scores.append((-covariance, row, position))
        elif options["covariance_low"] < covariance < options["covariance_high"] and not (
            a > 0 and d > math.log(2)
        ):
            key = reference_key(stream_seed(SEED, "selection", step), row, 0)
            draw = (reference_mix(key + position * GOLDEN) >> 11) / 2**53
            scores.append((-draw, row, position))
    count = max(1, int(options["selected_fraction"] * len(tokens)))
    return {(row, position) for _, row, position in sorted(scores)[:count]}, len(scores)


def check(name, ranks):
    """Each rank's marks are its part of what sorting all tokens gives; the candidates outnumber the marks."""
    assert len(ranks[0]) == 4
    for number, of_update in enumerate(zip(*ranks, strict=True)):
        tokens = [token for own in of_update for token in own]
        expected, candidates = expected_selection(name, tokens, number // 2)
        assert {(row, position) for row, position, *_, chosen in tokens if chosen} == expected
        assert candidates > len(expected) >= 2


@pytest.mark.parametrize("name", METHODS)
def test_a_run_selects_by_the_formula(name):
    updates, forward_passes = watched(0, 1, name)
    check(name, [updates])
    assert forward_passes == 2 * (1 + 2)  # a step: the old statistics, and one more for each update


def both(rank, world_size):
    return {name: watched(rank, world_size, name)[0] for name in METHODS}


def test_two_ranks_select_by_the_formula(worlds):
    ranks = worlds(2).run(both)
    for name in METHODS:
        check(name, [updates[name] for updates in ranks])


def test_the_draws_differ_between_steps_and_seeds():
    """The same tokens, scored by their draw alone: of 40 the best is another one."""

    class Drawn(Given):
        def selection_scores(self, tokens, statistics, draws):
            return draws

    scores = [[0.0] * 10] * 4
    best = {
        (seed, step): selected(scores, 1, 4, Drawn, stream_seed(seed, "selection", step))
        for seed in (1, 2)
        for step in (0, 1, 2)
    }
    assert len(set(map(frozenset, best.values()))) >= 4
    assert best[1, 0] == selected(scores, 1, 1, Drawn, stream_seed(1, "selection", 0))


@pytest.mark.parametrize("preset", ["tepo", "grpo_dapo", "entropy_term"])
def test_who_selects_nothing_does_not_pay(preset):
    policy = WatchedPolicy(make_objective(preset), temperature=TEMPERATURE)
    make_run(policy, max_steps=2).trainer.fit()
    assert policy.forward_passes == 2  # the old statistics of each step
    assert all(micro.selected is None for _, mini, _ in policy.updates for micro in mini.micro_batches)
