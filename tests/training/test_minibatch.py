"""From a step's responses to the micro-batches of each rank."""

from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        length_multiple=multiple,
        max_response_length=20,
    )


# --- shift ---------------------------------------------------------------------------------------


def test_the_mask_marks_the_position_that_predicts_the_trained_token():  # faults 16
    """Tokens 10, 11 | 12, 13, of which 12 alone is trained: the target under the mask is 12."""
    inputs, targets, mask = shifted_sequences(
        [[10, 11]], torch.tensor([[12, 13]]), torch.tensor([1]), width=3
    )
    assert targets[mask].tolist() == [12]
    assert inputs[mask].tolist() == [11]
    assert mask.tolist() == [[False, True, False]]
    assert inputs[0, :2].tolist() == [10, 11] and targets[0, :2].tolist() == [11, 12]


def test_shift_by_hand():
    inputs, targets, mask = shifted_sequences(
        [[1, 2, 3], [4], [5, 6]],
        torch.tensor([[7, 8, JUNK], [9, 10, 11], [JUNK, JUNK, JUNK]]),
        torch.tensor([2, 3, 0]),
        width=5,
    )
    assert inputs.tolist() == [[1, 2, 3, 7, 8], [4, 9, 10, 11, 0], [5, 6, 0, 0, 0]]
    assert targets.tolist() == [[2, 3, 7, 8, 0], [9, 10, 11, 0, 0], [6, 0, 0, 0, 0]]
    assert mask.int().tolist() == [[0, 0, 1, 1, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert inputs.is_contiguous() and targets.is_contiguous()


def test_the_last_token_fits_when_the_width_is_exact():
    """The last token is a target and never an input, so the width is one less than the tokens."""
    inputs, targets, mask = shifted_sequences([[1, 2]], torch.tensor([[3, 4]]), torch.tensor([2]), width=3)
    assert inputs.tolist() == [[1, 2, 3]] and targets.tolist() == [[2, 3, 4]]
    assert mask.tolist() == [[False, True, True]]


# --- widths --------------------------------------------------------------------------------------

ROWS = [([1, 2, 3], [4, 5]), ([6], [7, 8, 9]), ([1] * 6, []), ([2], [3])]


@pytest.mark.parametrize("multiple, width", [(1, 5), (2, 6), (4, 8), (8, 8)])
def test_widths_are_multiples_of_what_sequence_parallelism_needs(multiple, width):
    """The longest row is a prompt of 6 whose response is not trained on: 6 - 1 positions."""
    mini_batches = build(make_batch(ROWS), update=2, multiple=multiple)
    assert {micro.inputs.shape for mini in mini_batches for micro in mini.micro_batches} == {(1, width)}


def test_a_batch_that_needs_no_position_still_has_one():
    (mini_batch,) = build(make_batch([([1], []), ([2], [])]), update=2, micro=2, multiple=4)
    (micro,) = mini_batch.micro_batches
    assert micro.inputs.shape == (2, 4) and not micro.mask.any()


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
            own = torch.cat([micro.group_tokens for micro in mini_batch.micro_batches])
            expected = [5, 6, 0, 5, 5, 6, 1, 1]
            assert own.tolist() == expected[rank * 8 // ranks : (rank + 1) * 8 // ranks]


def test_totals_count_each_mini_batch_alone():
    """A group that is in both mini-batches counts in each with what it has there."""
    batch = make_batch([([1], [1, 1, 1]), ([1], [2]), ([1], [3] * 4), ([1], [])], groups=[0, 1, 0, 2])
    first, second = build(batch, update=2)
    assert (first.totals.tokens, first.totals.responses, first.totals.groups) == (4, 2, 2)
    assert (second.totals.tokens, second.totals.responses, second.totals.groups) == (4, 1, 1)
    assert [micro.group_tokens.tolist() for micro in first.micro_batches] == [[3], [1]]
    assert [micro.group_tokens.tolist() for micro in second.micro_batches] == [[4], [0]]


def test_a_masked_response_is_in_neither_numerator_nor_denominator():  # faults 8, 10
    """Two responses of 4 tokens, one of them masked: 4 tokens, 1 response, 1 group."""
    (mini_batch,) = build(make_batch([([1], [2] * 4), ([1], [])], groups=[0, 1]), update=2, micro=2)
    (micro,) = mini_batch.micro_batches
    assert micro.mask.sum(dim=1).tolist() == [4, 0]
    assert (mini_batch.totals.tokens, mini_batch.totals.responses, mini_batch.totals.groups) == (4, 1, 1)


def test_nothing_to_train_on():  # faults 9
    (mini_batch,) = build(make_batch([([1, 2], []), ([3], [])]), update=2)
    assert (mini_batch.totals.tokens, mini_batch.totals.responses, mini_batch.totals.groups) == (0, 0, 0)
    assert [micro.group_tokens.tolist() for micro in mini_batch.micro_batches] == [[0], [0]]


# --- sharding ------------------------------------------------------------------------------------


def test_a_partly_filled_mini_batch_is_padded_with_masked_responses():  # faults 24
    """3 responses where 8 make a mini-batch, on 2 ranks: the second has padding alone."""
    batch = make_batch([([1, 2], [3, 4]), ([5], [6]), ([7], [8, 9, 10])], groups=[0, 0, 1])
    ranks = [build(batch, update=8, micro=2, rank=rank, ranks=2) for rank in (0, 1)]
    for (mini_batch,) in ranks:
        assert len(mini_batch.micro_batches) == 2
        assert (mini_batch.totals.tokens, mini_batch.totals.responses, mini_batch.totals.groups) == (6, 3, 2)
        assert {micro.inputs.shape for micro in mini_batch.micro_batches} == {(2, 3)}
    rows = [[micro.rows.tolist() for micro in mini_batch.micro_batches] for (mini_batch,) in ranks]
    assert rows == [[[0, 1], [2, -1]], [[-1, -1], [-1, -1]]]
    masks = [
        [micro.mask.sum(dim=1).tolist() for micro in mini_batch.micro_batches] for (mini_batch,) in ranks
    ]
    assert masks == [[[2, 1], [3, 0]], [[0, 0], [0, 0]]]


def test_whole_mini_batches_are_not_padded():
    mini_batches = build(make_batch(ROWS), update=2)
    assert [micro.rows.tolist() for mini in mini_batches for micro in mini.micro_batches] == [
        [0],
        [1],
        [2],
        [3],
    ]


@pytest.mark.parametrize("update, micro, ranks", [(6, 1, 4), (6, 4, 1), (12, 4, 2), (5, 1, 1), (8, 1, 1)])
def test_arithmetic_that_leaves_a_rest_is_refused(update, micro, ranks):  # faults 24, 25
    """Nothing is dropped silently: 12 responses that do not divide into equal micro-batches of all ranks."""
    batch = make_batch([([1], [2])] * 12)
    with pytest.raises(AssertionError):
        build(batch, update=update, micro=micro, ranks=ranks)


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
    shapes, seen = set(), []
    for number in range(len(per_rank[0])):
        held = [micro for mini_batches in per_rank for micro in mini_batches[number].micro_batches]
        shapes |= {micro.inputs.shape for micro in held}
        numbers = torch.cat([micro.rows for micro in held]).tolist()
        real = [row for row in numbers if row >= 0]
        assert numbers == real + [-1] * (update - len(real))
        seen += real
        assert sum(int(micro.mask.sum()) for micro in held) == sum(len(rows[row][1]) for row in real)
        for micro in held:
            for place, row in enumerate(micro.rows.tolist()):
                if row >= 0:
                    check_row(micro, place, rows[row], batch.advantages[row])
    assert seen == list(range(len(rows)))
    (shape,) = shapes
    longest = max(len(prompt) + len(response) for prompt, response in rows) - 1
    assert shape[0] == micro_size and shape[1] % multiple == 0
    assert max(longest, 1) <= shape[1] < max(longest, 1) + multiple


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
