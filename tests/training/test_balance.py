"""How responses are shared out over ranks and micro-batches."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo_nemo.training import balance
from tepo_nemo.training.balance import MicroBatchLimits, estimated_work, share_out

ANY = MicroBatchLimits(responses=None, tokens=None, length_multiple=1)
LONG = 10**9  # attention costs nothing


def share(lengths, ranks=1, attention=LONG, **limits):
    return share_out(lengths, ranks, MicroBatchLimits(**(vars(ANY) | limits)), attention)


def padded_tokens(micro_batches, lengths):
    return sum(len(micro) * max(lengths[index] for index in micro) for micro in micro_batches if micro)


def skewed(count, shortest=40, tail=10):
    """Most responses short, one in sixteen ten times as long, and lengths in between."""
    return [shortest + (index * 7919) % shortest if index % 16 else shortest * tail for index in range(count)]


def test_work_of_a_sequence():
    """24 h^2 a token and 2 h for the square of the length: for h = 2 and 5 tokens, 480 + 100 over 96."""
    assert estimated_work(5, 12 * 2) == pytest.approx((24 * 4 * 5 + 4 * 25) / (24 * 4))


def test_similar_lengths_stand_together(monkeypatch):
    monkeypatch.setattr(balance, "MICRO_BATCH_COST", 1)
    [micro_batches] = share([3, 100, 4, 99, 3, 98])
    assert micro_batches == [[1, 3, 5], [2, 0, 4]] or micro_batches == [[1], [3], [5], [2], [0, 4]]
    assert padded_tokens(micro_batches, [3, 100, 4, 99, 3, 98]) <= 3 * 100 + 3 * 4


def test_padding_below_the_cost_of_a_micro_batch_is_left():
    """[10, 9, ..., 1] pads 45, and halved 20: not worth it; ten times as long it is."""
    assert [len(micro) for micro in share(list(range(1, 11)))[0]] == [10]
    assert len(share([10 * length for length in range(1, 11)])[0]) > 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_limit_of_responses(size):
    [micro_batches] = share([5] * 7, responses=size)
    assert sorted(map(len, micro_batches)) == sorted([size] * (7 // size) + [7 % size] * (7 % size > 0))


def test_limit_of_tokens_counts_padding():
    """Of a budget of 20 tokens: two of 10; a 9 pads to 10."""
    [micro_batches] = share([10, 9, 10, 9, 1, 1], tokens=20)
    assert all(padded_tokens([micro], [10, 9, 10, 9, 1, 1]) <= 20 for micro in micro_batches)
    assert len(micro_batches) == 3


def test_a_response_above_the_budget_stands_alone():
    [micro_batches] = share([50, 5, 5], tokens=20)
    assert micro_batches == [[0], [1, 2]]


def test_lengths_are_rounded_before_they_are_counted():
    [micro_batches] = share([9, 9], tokens=20, length_multiple=8)
    assert micro_batches == [[0], [1]]


def test_packed_sequences_are_not_padded():
    """23 tokens in two budgets of 20, and 50 in three; padded they would need more."""
    for lengths, count in (([9, 8, 3, 2, 1], 2), ([15, 5, 14, 6, 5, 5], 3)):
        [micro_batches] = share(lengths, tokens=20, packed=True)
        assert len(micro_batches) == count
        assert all(sum(lengths[index] for index in micro) <= 20 for micro in micro_batches)


def brute_force(lengths, limit):
    """The least cost over all ways to cut the sorted lengths into runs."""
    ordered = sorted(lengths, reverse=True)
    best = float("inf")
    for cuts in range(len(ordered)):
        for places in combinations(range(1, len(ordered)), cuts):
            bounds = [0, *places, len(ordered)]
            runs = [ordered[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
            if all(len(run) == 1 or len(run) * run[0] <= limit for run in runs):
                best = min(best, sum(len(run) * run[0] + balance.MICRO_BATCH_COST for run in runs))
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(50, 900))
def test_no_other_split_is_cheaper(lengths, limit):
    [micro_batches] = share(lengths, tokens=limit)
    cost = padded_tokens(micro_batches, lengths) + balance.MICRO_BATCH_COST * len(micro_batches)
    assert cost == brute_force(lengths, limit)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=1, max_size=40),
    st.integers(1, 5),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(1, 900),
    st.sampled_from([1, 2, 8]),
)
def test_every_response_is_in_one_place_and_every_limit_holds(lengths, ranks, responses, tokens, multiple):
    shares = share(lengths, ranks, responses=responses, tokens=tokens, length_multiple=multiple)
    assert len(shares) == ranks and len({len(micro_batches) for micro_batches in shares}) == 1
    micro_batches = [micro for of_rank in shares for micro in of_rank]
    assert sorted(index for micro in micro_batches for index in micro) == list(range(len(lengths)))
    for micro in micro_batches:
        longest = max((max(1, -(-lengths[index] // multiple)) * multiple for index in micro), default=0)
        assert responses is None or len(micro) <= responses
        assert tokens is None or len(micro) <= 1 or len(micro) * longest <= tokens
    assert shares == share(lengths, ranks, responses=responses, tokens=tokens, length_multiple=multiple)


@pytest.mark.parametrize("ranks", [2, 4])
def test_work_is_balanced_over_ranks(ranks):
    """Skewed lengths, attention and padding counted: the busiest rank is under 5 % above the mean."""
    lengths, attention = skewed(64 * ranks), 12 * 64

    def loads(shares):
        return [
            sum(
                len(micro) * estimated_work(max(lengths[index] for index in micro), attention)
                for micro in micro_batches
            )
            for micro_batches in shares
        ]

    balanced = loads(share(lengths, ranks, attention))
    assert max(balanced) / (sum(balanced) / ranks) < 1.05


def test_padding_of_skewed_lengths():
    """Under 5 % of what is computed, where padding to the longest wastes 79 %."""
    lengths = skewed(64)
    [micro_batches] = share(lengths, tokens=4096)
    assert 1 - sum(lengths) / padded_tokens(micro_batches, lengths) < 0.05
    assert 1 - sum(lengths) / (len(lengths) * max(lengths)) > 0.79


def test_a_rank_without_enough_responses_gets_empty_micro_batches():
    shares = share([100, 100, 100], ranks=2, responses=1)
    assert sorted(map(len, shares[0] + shares[1])) == [0, 1, 1, 1]
