"""Times against arithmetic by hand, and how they change with the hardware."""

import pytest

from tepo_nemo.config.load import load_config
from tepo_nemo.planning.cost import BANDWIDTH_UTILIZATION, LAYER_LAUNCH_S, MODEL_FLOPS_UTILIZATION
from tepo_nemo.planning.plan import Plan, make_plan


def plan(*overrides: str) -> Plan:
    return make_plan(load_config(["experiment=paper_qwen2_5_7b", *overrides], files=False))


def test_an_update_takes_six_operations_a_parameter_and_token():
    """And two more where activations are recomputed. At short lengths attention hardly counts."""
    short = ["rollout.max_response_length=64", "model.encoder_seq_length=128"]
    kept = plan(*short, "model.activations_checkpoint_granularity=null")
    tokens, without_tables = 512 * 128, 7_615_616_512 - 152064 * 3584 * 3 // 2
    expected = 6 * without_tables * tokens / (8 * 989e12 * MODEL_FLOPS_UTILIZATION)
    assert kept.cost[1].update_s == pytest.approx(expected, rel=0.02)
    assert plan(*short).cost[1].update_s == pytest.approx(4 / 3 * kept.cost[1].update_s)


def test_attention_adds_the_square_of_the_length():
    """Two products of half a square of 10240 x 10240, 28 heads of 128, in 28 layers."""
    longest = plan("model.activations_checkpoint_granularity=null").cost[1]
    tokens = 10240 * 2 * (7_615_616_512 - 2 * 152064 * 3584) + 8192 * 2 * 152064 * 3584
    attention = 28 * 2 * 2 * 28 * 128 * 10240**2 / 2
    expected = 3 * 512 * (tokens + attention) / (8 * 989e12 * MODEL_FLOPS_UTILIZATION)
    assert longest.update_s == pytest.approx(expected, rel=1e-3)


def test_a_rollout_reads_weights_and_keys_and_values():
    cost = plan().cost[1]
    weights = 8192 * 7_615_616_512 * 2 / 4
    cached = 256 * 14336 * sum(2048 + position for position in range(8192))
    launched = 8192 * 28 * LAYER_LAUNCH_S
    expected = (weights + cached) / (3350e9 * BANDWIDTH_UTILIZATION) + launched
    assert cost.rollout_s == pytest.approx(expected, rel=1e-3)


def test_more_batches_take_longer_and_more_copies_do_not():
    assert plan("rollout.batch_size=128").cost[0].rollout_s > 1.5 * plan().cost[0].rollout_s
    two, four = plan("hardware=h100x16").cost[1], plan("hardware=h100x32").cost[1]
    assert four.update_s == pytest.approx(two.update_s / 2)
    assert two.rollout_s / 2 < four.rollout_s < two.rollout_s


def test_typical_lengths_are_an_eighth_of_the_longest():
    typical, longest = plan().cost
    assert (typical.prompt_tokens, typical.response_tokens) == (256, 1024)
    assert (longest.prompt_tokens, longest.response_tokens) == (2048, 8192)
    assert typical.step_s < longest.step_s


def test_old_statistics_are_seven_eighths_of_a_pass():
    cost = plan().cost[1]
    assert cost.statistics_s == pytest.approx(7 / 8 * cost.update_s / 4)


def test_hardware_that_says_nothing_of_its_speed_has_no_times():
    assert plan("hardware.device_tflops=null").cost is None
