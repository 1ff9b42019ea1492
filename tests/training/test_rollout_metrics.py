"""What the trainer counts, by hand on a few responses."""

import math

import pytest
import torch
from support.rollouts import Response, make_scored

from tepo_nemo.training.balance import MicroBatchLimits
from tepo_nemo.training.batch import MicroBatch, TrainBatch, add_means
from tepo_nemo.training.collect import CollectedStep, trained_lengths
from tepo_nemo.training.metrics import logprob_gap, padding_mean, rollout_metrics
from tepo_nemo.training.minibatch import build_mini_batches


def test_metrics_of_a_rollout_by_hand():
    """Over all that was generated, whatever was kept."""
    generated = make_scored(
        [
            Response(0, 1.0, 3),
            Response(0, 1.0, 5),
            Response(0, None, 6, truncated=True),  # a failed grading makes no spread
            Response(1, 0.0, 2),
            Response(1, 1.0, 4),
            Response(2, 0.5, 6, truncated=True),
            Response(2, None, 1),  # one that votes is no spread
            Response(3, None, 1),
        ]
    )
    metrics = rollout_metrics(
        CollectedStep(generated.select_groups([1]), generated, kept_groups=[1], consumed_prompts=4)
    )
    assert metrics == {
        "reward/mean": 3.5 / 5,
        "reward/group_std_zero_fraction": 3 / 4,
        "response_length/mean": 28 / 8,
        "response_length/truncated_fraction": 2 / 8,
        "verifier/failed_fraction": 3 / 8,
        "rollout/invalid_fraction": 0,
    }


@pytest.mark.parametrize("truncated", [False, True])
def test_all_truncated_and_none(truncated):  # faults 34
    generated = make_scored([Response(0, 0.0, 4, truncated)] * 2 + [Response(1, 0.0, 4, truncated)] * 2)
    metrics = rollout_metrics(CollectedStep(None, generated, [], 2))
    assert metrics["response_length/truncated_fraction"] == float(truncated)
    assert metrics["reward/group_std_zero_fraction"] == 1


def test_a_verifier_that_fails_on_everything():
    metrics = rollout_metrics(CollectedStep(None, make_scored([Response(0, None), Response(0, None)]), [], 1))
    assert metrics["verifier/failed_fraction"] == 1
    assert metrics["reward/group_std_zero_fraction"] == 1
    assert math.isnan(metrics["reward/mean"])


def gap_and_padding(scored, *, update, micro=None, multiple=1, ranks=1, offset=0.0):
    """Both means, with old log-probs `offset` above the sampler's on trained tokens and junk elsewhere."""
    sums = {}
    for rank in range(ranks):
        mini_batches = build_mini_batches(
            TrainBatch(
                prompt_tokens=[
                    scored.rollouts.prompts[group].tokens for group in scored.rollouts.groups.tolist()
                ],
                response_tokens=scored.rollouts.generation.tokens,
                response_lengths=trained_lengths(scored),
                groups=scored.rollouts.groups,
                advantages=torch.zeros(len(scored.rollouts)),
                sampled_logprobs=scored.rollouts.generation.logprobs,
            ),
            responses_per_update=update,
            limits=MicroBatchLimits(micro, None, multiple),
            attention_length=100,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            max_response_length=9,
        )
        means = padding_mean(mini_batches)
        for mini_batch in mini_batches:
            for batch in mini_batch.micro_batches:
                # The sampler's log-prob of a token is minus its id over 1000, see support.rollouts.
                old = torch.where(batch.mask, offset - batch.targets / 1000, float("nan"))
                add_means(means, logprob_gap(batch, old))
        add_means(sums, means)
    return sums["rollout/logprob_gap_mean"], sums["tokens/padding_fraction"]


# Prompts have 2 tokens: a row needs 1 + length positions. 2 + 4 + 0 + 3 trained tokens.
SCORED = make_scored([Response(0, 1.0, 2), Response(0, 0.0, 4), Response(1, None, 3), Response(1, 1.0, 3)])


@pytest.mark.parametrize("offset", [0.25, -0.25])
@pytest.mark.parametrize(
    "ranks, micro, padded",
    [
        (1, 4, 15),  # 3 rows of 5; the one that is not trained on is left out
        (1, 1, 5 + 4 + 3),
        (4, 1, 5 + 4 + 3 + 1),  # a rank with nothing has a position of padding
    ],
)
def test_gap_and_padding_by_hand(offset, ranks, micro, padded):
    """The rows need 3, 5, 0 (not trained on) and 4 positions."""
    gap, padding = gap_and_padding(SCORED, update=4, micro=micro, ranks=ranks, offset=offset)
    assert gap.numerator == pytest.approx(0.25 * 9, abs=1e-5) and gap.denominator == 9
    assert (padding.numerator, padding.denominator) == (padded - 3 - 5 - 4, padded)


def test_the_gap_is_0_where_both_agree():
    gap, _ = gap_and_padding(SCORED, update=4, micro=2)
    assert gap.numerator == pytest.approx(0, abs=1e-5)


def test_multiples_count_as_padding():
    """5, 4 and 3 positions, rounded up to multiples of 4."""
    _, padding = gap_and_padding(SCORED, update=4, micro=1, multiple=4)
    assert (padding.numerator, padding.denominator) == (8 + 4 + 4 - 12, 8 + 4 + 4)


def test_nothing_trained():
    scored = make_scored([Response(0, None), Response(0, None)])
    gap, padding = gap_and_padding(scored, update=2, micro=1)
    assert (gap.numerator, gap.denominator) == (0, 0)
    assert padding.numerator == padding.denominator > 0


def test_there_is_no_gap_where_nothing_was_sampled():
    mask = torch.ones(1, 2, dtype=torch.bool)
    zeros = torch.zeros(1, 2)
    micro = MicroBatch(
        zeros.long(),
        zeros.long(),
        mask,
        torch.tensor([2]),
        torch.arange(2),
        zeros,
        torch.ones(1),
        torch.zeros(1).long(),
    )
    assert logprob_gap(micro, zeros) == {}
