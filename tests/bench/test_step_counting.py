"""What a step has to do, and how what it does is counted, against counts by hand."""

import pytest
import torch

from tepo_nemo.bench.step.passes import (
    Purpose,
    Shape,
    counting_passes,
    imbalance,
    layer_flops,
    padding_fraction,
)
from tepo_nemo.bench.step.shares import PAPER, RANKS, count_shares
from tepo_nemo.bench.step.workload import Workload

SMALL = Workload("toy", "skewed", prompts=4, responses_per_prompt=2, updates=4, median_length=3)


def test_skewed_lengths_are_the_quantiles_of_a_log_normal_distribution():
    # Normal scores of (i + 1/2) / 8: -1.534 -0.887 -0.489 -0.157 and up again; that of 63.5 / 64: 2.418.
    # 3 x 10^(score / 2.418):         0.70   1.29   1.88   2.58   3.48 4.78 6.98 12.9
    assert sorted(sum(SMALL.limits, [])) == [1, 1, 2, 3, 3, 5, 7, 13]
    assert [len(row) for row in SMALL.limits] == [2, 2, 2, 2]
    assert (SMALL.longest, SMALL.trained_tokens) == (13, 35)


def test_no_skewed_length_is_more_than_ten_times_the_median():
    large = Workload("toy", "skewed", prompts=64, responses_per_prompt=4, updates=4, median_length=3)
    lengths = sorted(sum(large.limits, []))
    assert (lengths[127], lengths[128], lengths[-1]) == (3, 3, 30)
    assert lengths.count(30) == 2  # those whose scores are above 2.418: 2.52 and 2.89


def test_equal_lengths_have_the_same_mean():
    equal = Workload("toy", "equal", prompts=4, responses_per_prompt=2, updates=4, median_length=3)
    assert equal.limits == [[4, 4]] * 4  # 35 / 8


def test_lengths_are_in_no_order_and_always_the_same():
    lengths = sum(SMALL.limits, [])
    assert lengths != sorted(lengths)
    assert SMALL.limits == Workload("toy", "skewed", 4, 2, 4, 3).limits


def test_positions_leave_out_the_last_token_of_each_response():
    prompts = SMALL.prompt_lengths()
    assert SMALL.positions == 2 * sum(prompts) + 35 - 8


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids, position_ids=None, inference_params=None):
        return self.weight * input_ids.sum()


def test_passes_are_counted_by_what_they_are_for():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with counting_passes(model, optimizer) as passes:
        with torch.no_grad():
            model(torch.ones(5, 7), inference_params=object())
            model(input_ids=torch.ones(2, 3))
        model(torch.ones(1, 4), None)
        model(input_ids=torch.ones(2, 6))
        optimizer.step()
        model(torch.ones(3, 1))
        optimizer.step()
    model(torch.ones(9, 9))  # nobody looks any more
    optimizer.step()
    assert passes.shapes == {
        Purpose.GENERATION: [(5, 7)],
        Purpose.STATISTICS: [(2, 3)],
        Purpose.TRAINING: [(1, 4), (2, 6), (3, 1)],
    }
    assert passes.updates == [[(1, 4), (2, 6)], [(3, 1)]]
    assert passes.rows(Purpose.STATISTICS, Purpose.TRAINING, shortest=1) == 2 + 1 + 2 + 3
    assert passes.rows(Purpose.STATISTICS, Purpose.TRAINING, shortest=3) == 2 + 1 + 2
    assert passes.positions(Purpose.TRAINING) == 4 + 12 + 3


def test_padding_fraction():
    assert padding_fraction(passed=40, needed=30) == 0.25


def test_operations_of_a_layer():
    # A token: 8 x 16 for the four projections, 6 x 4 x 5 for the feed-forward, 4 x 4 x 3 for three positions.
    assert layer_flops(Shape(2, 3), hidden=4, feed_forward=5) == 6 * (128 + 120 + 48)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ([[4, 2], [2, 2]], 2 * 6 / 10 - 1),  # they wait in the first update: 4 + 2 where 5 would do
        ([[4, 2], [2, 4]], 2 * 8 / 12 - 1),  # what is even over the step is not in either update
        ([[3, 5], [3, 5]], 0),
        ([[3, 5]], 0),
    ],
)
def test_imbalance(work, expected):
    assert imbalance(work) == pytest.approx(expected)


def test_shares_of_equal_lengths_have_no_padding_and_no_imbalance():
    """4 updates of a prompt's two responses of 4 tokens: each rank of two has one, prompt + 3 positions."""
    equal = Workload("toy", "equal", prompts=4, responses_per_prompt=2, updates=4, median_length=3)
    shares = count_shares(equal, 2)
    longest = max(equal.prompt_lengths()) + 3
    assert (shares.micro_batches, shares.padding, shares.imbalance) == (1, 0, 0)
    assert shares.padding_to_longest == pytest.approx(1 - equal.positions / (8 * longest))
    assert shares.imbalance_of_arrival == 0


@pytest.mark.parametrize("ranks", RANKS)
def test_the_paper_s_batch_is_shared_out_evenly(ranks):
    shares = count_shares(PAPER, ranks)
    assert shares.padding < 0.05 < 0.5 < shares.padding_to_longest
    assert shares.imbalance < 0.05
    assert ranks == 1 or shares.imbalance_of_arrival > 2 * shares.imbalance
