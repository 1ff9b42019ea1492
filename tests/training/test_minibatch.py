"""From a step's responses to the micro-batches of each rank."""

from dataclasses import replace
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_nemo.training.balance import MicroBatchLimits
from tepo_nemo.training.batch import TrainBatch
from tepo_nemo.training.minibatch import build_mini_batches, shifted_sequences

JUNK = 77


def make_batch(rows, groups=None, advantages=None):
    """Rows are (prompt, response) pairs of token lists; columns past a response hold junk."""
    width = max(1, *(len(response) for _, response in rows)) + 1
    padded = [list(response) + [JUNK] * (width - len(response)) for _, response in rows]
    return TrainBatch(
        prompt_tokens=[prompt for prompt, _ in rows],
        response_tokens=torch.tensor(padded),
        response_lengths=torch.tensor([len(response) for _, response in rows]),
        groups=torch.tensor(groups or [0] * len(rows)),
        advantages=torch.tensor(advantages or [0.5 + row for row in range(len(rows))]),
    )


def build(batch, update, micro=1, rank=0, ranks=1, multiple=1):
    return build_mini_batches(
        batch,
        responses_per_update=update,
        limits=MicroBatchLimits(micro, None, multiple),
        attention_length=100,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        max_response_length=20,
    )


# --- shift ---------------------------------------------------------------------------------------


def test_the_mask_marks_the_position_that_predicts_the_trained_token():  # faults 16
    """Tokens 10, 11 | 12, 13, of which 12 alone is trained: the target under the mask is 12."""
    inputs, targets, mask, column = shifted_sequences([[10, 11]], torch.tensor([[12, 13]]), torch.tensor([1]))
    assert targets[mask].tolist() == [12]
    assert inputs[mask].tolist() == [11]
    assert mask.tolist() == [[False, True]]
    assert inputs.tolist() == [[10, 11]] and targets.tolist() == [[11, 12]]
    assert column[mask].tolist() == [0]


def test_shift_by_hand():
    inputs, targets, mask, column = shifted_sequences(
        [[1, 2, 3], [4], [5, 6]],
        torch.tensor([[7, 8, JUNK], [9, 10, 11], [JUNK, JUNK, JUNK]]),
        torch.tensor([2, 3, 0]),
    )
    assert inputs.tolist() == [[1, 2, 3, 7], [4, 9, 10, 11], [5, 6, 0, 0]]
    assert targets.tolist() == [[2, 3, 7, 8], [9, 10, 11, 0], [6, 0, 0, 0]]
    assert mask.int().tolist() == [[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert column[mask].tolist() == [0, 1, 0, 1, 2]


def test_responses_without_a_column():
    inputs, targets, mask, _ = shifted_sequences(
        [[1, 2, 3]], torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0])
    )
    assert (inputs.tolist(), targets.tolist(), mask.any().item()) == ([[1, 2]], [[2, 3]], False)


# --- widths --------------------------------------------------------------------------------------

ROWS = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9]), ([1] * 6, []), ([2], [3])]


@pytest.mark.parametrize("multiple, widths", [(1, [4, 3, 2]), (2, [4, 4, 2]), (4, [4] * 3), (8, [8] * 3)])
def test_each_micro_batch_is_padded_to_its_own_longest(multiple, widths):
    """Rows need 4, 3 and 2 positions, rounded for sequence parallelism; one is not trained on: left out."""
    rows = [ROWS[0], ROWS[1], ([1, 2], [3]), ROWS[2]]
    (mini_batch,) = build(make_batch(rows), update=4, multiple=multiple)
    assert [list(micro.inputs.shape) for micro in mini_batch.micro_batches] == [
        [1, width] for width in widths
    ]


def test_a_batch_that_needs_no_position_still_has_one():
    (mini_batch,) = build(make_batch([([1], []), ([2], [])]), update=2, micro=2, multiple=4)
    (micro,) = mini_batch.micro_batches
    assert micro.inputs.shape == (1, 4) and not micro.mask.any()


def test_positions_are_those_of_the_mask_and_values_go_back_there():
    (mini_batch,) = build(make_batch([([1, 2], [3, 4]), ([5], [6])]), update=2, micro=2)
    (micro,) = mini_batch.micro_batches
    assert micro.positions.tolist() == [1, 2, 3]  # of two rows of three
    assert micro.spread(torch.tensor([0.5, 1.5, 2.5])).tolist() == [[0, 0.5, 1.5], [2.5, 0, 0]]
    assert torch.equal(micro.spread(micro.targets[micro.mask]), micro.targets * micro.mask)


# --- denominators --------------------------------------------------------------------------------


def test_totals_count_the_whole_mini_batch_on_every_rank():  # faults 6, T7, T9
    """Group 0 is split over the ranks and micro-batches; group 2 has nothing to train on."""
    batch = make_batch(
        [
            ([1], [1, 1, 1]),
            ([1], [2]),
            ([1], []),
            ([1], [3, 3]),
            ([1], []),
            ([1], [4] * 5),
            ([1], [5]),
            ([1], []),
        ],
        groups=[0, 1, 2, 0, 0, 1, 3, 3],
    )
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            (mini_batch,) = build(batch, update=8, micro=1, rank=rank, ranks=ranks)
            totals = mini_batch.totals
            assert (totals.tokens, totals.responses, totals.groups) == (12, 5, 3)
            assert totals.max_response_length == 20 and totals.statistics is None
            own = {
                int(row): int(tokens)
                for micro in mini_batch.micro_batches
                for row, tokens in zip(micro.rows, micro.group_tokens, strict=True)
                if row >= 0
            }
            assert own.items() <= dict(enumerate([5, 6, 0, 5, 5, 6, 1, 1])).items()


def test_totals_count_each_mini_batch_alone():
    """A group that is in both mini-batches counts in each with what it has there."""
    batch = make_batch([([1], [1, 1, 1]), ([1], [2]), ([1], [3] * 4), ([1], [])], groups=[0, 1, 0, 2])
    first, second = build(batch, update=2)
    assert (first.totals.tokens, first.totals.responses, first.totals.groups) == (4, 2, 2)
    assert (second.totals.tokens, second.totals.responses, second.totals.groups) == (4, 1, 1)
    assert [micro.group_tokens.tolist() for micro in first.micro_batches] == [[3], [1]]
    assert [micro.group_tokens.tolist() for micro in second.micro_batches] == [[4]]


def test_a_masked_response_is_in_neither_numerator_nor_denominator():  # faults 8, 10
    """Two responses of 4 tokens, one of them masked: 4 tokens, 1 response, 1 group."""
    (mini_batch,) = build(make_batch([([1], [2] * 4), ([1], [])], groups=[0, 1]), update=2, micro=2)
    (micro,) = mini_batch.micro_batches
    assert micro.mask.sum(dim=1).tolist() == [4] and micro.rows.tolist() == [0]
    assert (mini_batch.totals.tokens, mini_batch.totals.responses, mini_batch.totals.groups) == (4, 1, 1)


def test_nothing_to_train_on():  # faults 9
    (mini_batch,) = build(make_batch([([1, 2], []), ([3], [])]), update=2)
    assert [micro.rows.tolist() for micro in mini_batch.micro_batches] == [[-1]]
    assert (mini_batch.totals.tokens, mini_batch.totals.responses, mini_batch.totals.groups) == (0, 0, 0)


# --- sharding ------------------------------------------------------------------------------------


def test_a_partly_filled_mini_batch_is_shared_out_as_it_is():  # faults 24
    """3 responses where 8 make a mini-batch, on 4 ranks: one of them has nothing, and a pass over nothing."""
    batch = make_batch([([1, 2], [3, 4]), ([5], [6]), ([7], [8, 9, 10])], groups=[0, 0, 1])
    ranks = [build(batch, update=8, micro=2, rank=rank, ranks=4) for rank in range(4)]
    for (mini_batch,) in ranks:
        (micro,) = mini_batch.micro_batches
        assert (mini_batch.totals.tokens, mini_batch.totals.responses, mini_batch.totals.groups) == (6, 3, 2)
    rows = [mini_batch.micro_batches[0].rows.tolist() for (mini_batch,) in ranks]
    assert sorted(rows) == [[-1], [0], [1], [2]]
    (nothing,) = [
        mini_batch.micro_batches[0] for (mini_batch,) in ranks if -1 in mini_batch.micro_batches[0].rows
    ]
    assert nothing.inputs.shape == (1, 1) and not nothing.mask.any() and len(nothing.positions) == 0


def test_mini_batches_are_taken_in_order():
    mini_batches = build(make_batch(ROWS), update=2)
    rows = [[int(row) for micro in mini.micro_batches for row in micro.rows] for mini in mini_batches]
    assert [sorted(of_mini) for of_mini in rows] == [[0, 1], [3]]  # nothing of row 2 is trained on


def test_the_sampler_s_log_probs_stand_where_their_tokens_are_targets():
    batch = replace(
        make_batch([([1, 2], [3, 4]), ([5], [6])]),
        sampled_logprobs=torch.tensor([[-0.5, -1.5, 9], [-2.5, 9, 9]]),
    )
    (mini_batch,) = build(batch, update=2, micro=2)
    (micro,) = mini_batch.micro_batches
    assert micro.sampled_logprobs.tolist() == [[0, -0.5, -1.5], [-2.5, 0, 0]]


@pytest.mark.parametrize("update", [5, 8, 11])
def test_a_rest_is_refused(update):  # faults 24, 25
    """Nothing is dropped silently: 12 responses that make no whole mini-batches."""
    with pytest.raises(AssertionError):
        build(make_batch([([1], [2])] * 12), update=update)


TOKENS = st.integers(1, 9)


@st.composite
def layouts(draw):
    ranks, micro, passes, updates = (draw(st.integers(1, n)) for n in (3, 2, 2, 3))
    update = ranks * micro * passes
    count = draw(st.integers(1, update - 1)) if update > 1 and draw(st.booleans()) else update * updates
    rows = [
        (draw(st.lists(TOKENS, min_size=1, max_size=5)), draw(st.lists(TOKENS, max_size=5)))
        for _ in range(count)
    ]
    groups = [draw(st.integers(0, 3)) for _ in range(count)]
    return ranks, micro, update, rows, groups, draw(st.sampled_from([1, 2, 4]))


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_the_ranks_together_hold_each_response_once_and_whole(layout):  # faults 24, T3
    ranks, micro_size, update, rows, groups, multiple = layout
    batch = make_batch(rows, groups)
    per_rank = [build(batch, update, micro_size, rank, ranks, multiple) for rank in range(ranks)]
    assert {len(mini_batches) for mini_batches in per_rank} == {ceil(len(rows) / update)}
    for number in range(len(per_rank[0])):
        held = [micro for mini_batches in per_rank for micro in mini_batches[number].micro_batches]
        expected = range(number * update, min((number + 1) * update, len(rows)))
        real = [row for micro in held for row in micro.rows.tolist() if row >= 0]
        assert sorted(real) == [row for row in expected if rows[row][1]], "what is not trained on is left out"
        assert sum(int(micro.mask.sum()) for micro in held) == sum(len(rows[row][1]) for row in real)
        assert len({len(mini_batches[number].micro_batches) for mini_batches in per_rank}) == 1
        for micro in held:
            own = [rows[row] for row in micro.rows.tolist() if row >= 0]
            longest = max(
                (len(prompt) + len(response) - 1 for prompt, response in own if response), default=0
            )
            assert micro.inputs.shape[1] == max(1, ceil(longest / multiple)) * multiple
            assert len(micro.rows) <= micro_size
            for place, row in enumerate(micro.rows.tolist()):
                if row >= 0:
                    check_row(micro, place, rows[row], batch.advantages[row])


def check_row(micro, place, row, advantage):
    """Read back as tokens: what stands before the first trained target, and the trained targets."""
    prompt, response = row
    inputs, targets, mask = micro.inputs[place], micro.targets[place], micro.mask[place]
    tokens = prompt + response
    assert inputs[: len(tokens) - 1].tolist() == tokens[:-1]
    assert targets[: len(tokens) - 1].tolist() == tokens[1:]
    assert targets[mask].tolist() == response
    assert mask.nonzero().flatten().tolist() == list(range(len(prompt) - 1, len(tokens) - 1))
    assert (micro.advantages[place] == advantage).all()
