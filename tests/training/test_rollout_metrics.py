"""What the trainer counts, by hand on a few responses."""

import math

import pytest
import torch
from support.rollouts import Response, make_scored

from tepo_nemo.training.batch import TokenStatistics, TrainBatch
from tepo_nemo.training.collect import CollectedStep, trained_lengths
from tepo_nemo.training.metrics import batch_means, rollout_metrics
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
        CollectedStep(kept=generated.select_groups([1]), generated=generated, consumed_prompts=4)
    )
    assert metrics == {
        "reward/mean": 3.5 / 5,
        "reward/group_std_zero_fraction": 3 / 4,
        "response_length/mean": 28 / 8,
        "response_length/truncated_fraction": 2 / 8,
        "verifier/failed_fraction": 3 / 8,
    }


@pytest.mark.parametrize("truncated", [False, True])
def test_all_truncated_and_none(truncated):  # faults 34
    generated = make_scored([Response(0, 0.0, 4, truncated)] * 2 + [Response(1, 0.0, 4, truncated)] * 2)
    metrics = rollout_metrics(CollectedStep(None, generated, 2))
    assert metrics["response_length/truncated_fraction"] == float(truncated)
    assert metrics["reward/group_std_zero_fraction"] == 1


def test_a_verifier_that_fails_on_everything():
    metrics = rollout_metrics(CollectedStep(None, make_scored([Response(0, None), Response(0, None)]), 1))
    assert metrics["verifier/failed_fraction"] == 1
    assert metrics["reward/group_std_zero_fraction"] == 1
    assert math.isnan(metrics["reward/mean"])


def gap_and_padding(scored, *, update, micro, multiple=1, ranks=1, offset=0.0):
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
            ),
            responses_per_update=update,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            length_multiple=multiple,
            max_response_length=9,
        )
        for mini_batch in mini_batches:
            for number, batch in enumerate(mini_batch.micro_batches):
                # The sampler's log-prob of a token is minus its id over 1000, see support.rollouts.
                old = torch.where(batch.mask, offset - batch.targets / 1000, float("nan"))
                mini_batch.micro_batches[number] = batch.with_old(TokenStatistics(old, old))
        for name, mean in batch_means(mini_batches, scored.rollouts.generation).items():
            numerator, denominator = sums.get(name, (0, 0))
            sums[name] = numerator + float(mean.numerator), denominator + float(mean.denominator)
    return sums["rollout/logprob_gap_mean"], sums["tokens/padding_fraction"]


# Prompts have 2 tokens: a row needs 1 + length positions. 2 + 4 + 0 + 3 trained tokens.
SCORED = make_scored([Response(0, 1.0, 2), Response(0, 0.0, 4), Response(1, None, 3), Response(1, 1.0, 3)])


@pytest.mark.parametrize("offset", [0.25, -0.25])
@pytest.mark.parametrize("ranks, micro", [(1, 4), (1, 1), (2, 2), (2, 1), (4, 1)])
def test_gap_and_padding_by_hand(offset, ranks, micro):
    """Widths are 5 = 1 + 4: the rows need 3, 5, 0 (not trained on) and 4 positions of 20."""
    (gap, trained), (padding, positions) = gap_and_padding(
        SCORED, update=4, micro=micro, ranks=ranks, offset=offset
    )
    assert gap == pytest.approx(0.25 * 9, abs=1e-5) and trained == 9
    assert (padding, positions) == (20 - 3 - 5 - 4, 20)


def test_the_gap_is_0_where_both_agree():
    (gap, _), _ = gap_and_padding(SCORED, update=4, micro=2)
    assert gap == pytest.approx(0, abs=1e-5)


def test_padding_rows_and_multiples_count_as_padding():
    """5 positions are widened to 8, and 4 responses to 6 rows."""
    (_, trained), (padding, positions) = gap_and_padding(SCORED, update=6, micro=3, multiple=4)
    assert trained == 9
    assert (padding, positions) == (48 - 12, 48)


def test_nothing_trained():
    scored = make_scored([Response(0, None), Response(0, None)])
    (gap, trained), (padding, positions) = gap_and_padding(scored, update=2, micro=1)
    assert (gap, trained) == (0, 0) and padding == positions > 0
