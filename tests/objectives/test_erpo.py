"""ERPO: advantages of tokens against the formulas in plain loops, and its edge cases by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.cases import assert_same, build_preset, cases, preset, run
from objectives.process import DELTA, OPTIONS, Response, assert_shaped, rollouts, shaped, to_rollout

from tepo_nemo.errors import UserError

LOSS_OPTIONS = ("clip_low", "clip_high", "dual_clip", "aggregation")


def by_length(buckets):
    return lambda response, t: buckets * t // len(response.old_entropy)


def sign(response, members):
    return math.copysign(1.0, response.advantage) if response.advantage else 0.0


def shape(responses, width=None, **options):
    return build_preset("erpo", **options).shape_advantages(to_rollout(responses, width))


def make(group, advantage, signal, entropy=None, reward=0.0):
    """A response whose s is `signal` at beta_p = 1."""
    zeros = [0.0] * len(signal)
    return Response(group, reward, advantage, signal, entropy or zeros, zeros)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(responses=rollouts(), options=st.fixed_dictionaries(OPTIONS))
def test_advantages_match_the_formulas(responses, options):
    width = 1 + max(len(response.old_entropy) for response in responses)
    expected = shaped(responses, options, by_length(options["buckets"]), sign)
    assert_shaped(shape(responses, width, **options), expected)


def test_four_tokens_by_hand():
    """Two responses of two tokens, K = 2, equal entropies: W = 1/2, s~ = +-1 in each bucket.

    W sgn(A) s~ = .5 -.5 | .5 -.5, of std .5, so Psi = 1 -1 | 1 -1; with eta = .5 on A = 1 1 | -1 -1 the sums
    are 1.5 .5 | -.5 -1.5, of mean 0 and std sqrt(1.25).
    """
    responses = [make(0, 1.0, [0.3, -0.1]), make(0, -1.0, [-0.5, 0.7])]
    actual = shape(responses, buckets=2, process_std=1.0, process_weight=0.5)
    expected = np.array([[1.5, 0.5], [-0.5, -1.5]]) / math.sqrt(1.25)
    np.testing.assert_allclose(actual, expected, rtol=2e-5)


def test_buckets_are_stages_of_a_response():
    """K = 2 over 1, 2 and 5 tokens: 0 | 0 1 | 0 0 0 1 1."""
    rollout = to_rollout([make(0, 1.0, [0.0] * length) for length in (1, 2, 5)])
    bucket = build_preset("erpo", buckets=2).bucket(rollout)
    assert [row[:n].tolist() for row, n in zip(bucket, (1, 2, 5), strict=True)] == [
        [0], [0, 1], [0, 0, 0, 1, 1],
    ]  # fmt: skip


@pytest.mark.parametrize("buckets", [1, 3, 7, 8, 25])
@pytest.mark.parametrize("length", [1, 2, 3, 24, 25, 50])
def test_every_token_is_in_one_of_the_buckets(buckets, length):
    """Whole numbers alone: 25 * (7 / 25) is not 7 in floating point."""
    bucket = build_preset("erpo", buckets=buckets).bucket(to_rollout([make(0, 1.0, [0.0] * length)]))[0]
    assert bucket.tolist() == [math.floor(buckets * t / length) for t in range(length)]
    assert bucket.max() < buckets


@pytest.mark.parametrize("gamma", [0.0, 1.0, 3.0])
def test_the_gate_weighs_hesitant_tokens_more(gamma):
    """K = 1, and sgn(A) s~ is 1 everywhere: what is left of the signal is the gate."""
    entropy = [0.0, 1.0, 5.0]
    responses = [make(0, 1.0, [1.0] * 3, entropy), make(0, -1.0, [-1.0] * 3, entropy)]
    actual = shape(responses, buckets=1, gate_sharpness=gamma, process_std=1.0, process_weight=0.3).numpy()
    gate = 1 / (1 + np.exp(-gamma * (np.array(entropy) - 2) / math.sqrt(14 / 3)))
    process = 0.3 * gate / (gate.std() + DELTA) if gamma else np.zeros(3)
    total = np.array([process + 1, process - 1])
    np.testing.assert_allclose(actual, (total - total.mean()) / total.std(), rtol=1e-4)
    assert (np.diff(actual) > 0).all() == (gamma > 0)


def test_a_group_without_spread_gets_exactly_zero():
    """Whatever its signal; and the other group is as if alone."""
    dull = [make(0, 0.0, [0.3, -0.2, 5.0]), make(0, 0.0, [1.0])]
    lively = [make(1, 1.0, [0.3, -0.2]), make(1, -1.0, [1.0, 0.1])]
    both = shape([dull[0], lively[0], dull[1], lively[1]])
    assert not both[[0, 2]].any()
    assert torch.equal(both[[1, 3], :2], shape(lively))


def test_a_bucket_of_one_token_has_nothing_to_compare():
    """K = 3: the response of length 3 is alone in buckets 1 and 2; there the advantage is the response's."""
    responses = [make(0, 1.0, [0.3, 9.0, -9.0]), make(0, -1.0, [0.1])]
    actual = shape(responses, buckets=3)[0]
    assert actual[1] == actual[2] != actual[0]


def test_responses_of_one_token():
    """All in bucket 0."""
    responses = [make(0, advantage, [signal]) for advantage, signal in ((1.0, 0.2), (1.0, -0.4), (-2.0, 0.5))]
    expected = shaped(responses, preset("erpo"), lambda *_: 0, sign)
    assert_shaped(shape(responses), expected)


@pytest.mark.parametrize("signal", [0.0, 0.1, -3.7])
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_equal_signals_leave_the_advantage_of_the_response(signal, tokens):
    """Zero std: at the first rollout the policy is the reference, so that s = 0; and whatever it is."""
    responses = [make(0, 1.0, [signal] * tokens), make(0, -1.0, [signal] * tokens)]
    actual = shape(responses)
    np.testing.assert_allclose(actual, np.sign([[1.0] * tokens, [-1.0] * tokens]), rtol=2e-6)


def test_values_that_are_all_equal_are_divided_by_delta_alone():
    """s~ = 1 and -1 on two tokens of opposite A and equal entropy: both W sgn(A) s~ are 1/2, of std 0. The
    500,000 that both get are gone with the mean."""
    actual = shape([make(0, 1.0, [0.4]), make(0, -1.0, [-0.4])])
    np.testing.assert_allclose(actual, [[1.0], [-1.0]], rtol=2e-6)


def test_a_response_without_a_verdict_does_not_count():
    """It has no trained token; neither its junk nor its place changes the others."""
    responses = [make(0, 1.0, [0.3, -0.2]), make(0, -1.0, [1.0, 0.1]), make(1, 0.5, [0.1])]
    expected = shape(responses, 3)
    nothing = Response(0, math.nan, 0.0, [], [], [])
    for place in range(4):
        actual = shape([*responses[:place], nothing, *responses[place:]], 3)
        assert not actual[place].any()
        assert torch.equal(actual[[row for row in range(4) if row != place]], expected)


def test_no_response_at_all_to_train_on():
    assert not shape([Response(0, 0.0, 0.0, [], [], [])] * 2, 3).any()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(responses=rollouts(), seed=st.integers(0, 1000))
def test_the_order_of_responses_does_not_matter(responses, seed):
    order = np.random.default_rng(seed).permutation(len(responses))
    width = 1 + max(len(response.old_entropy) for response in responses)
    shuffled = shape([responses[k] for k in order], width)
    np.testing.assert_allclose(shuffled, shape(responses, width)[order], rtol=1e-7, atol=1e-7)


def test_production_precision():
    """Advantages come and go in float32; the arithmetic between is float64."""
    rollout = to_rollout(
        [make(0, 1.0, [0.3, -0.2, 0.9], [1.0, 0.2, 0.4]), make(0, -1.0, [1.0, 0.1, -0.5], [0.1, 0.7, 2.0])]
    )
    single = replace(
        rollout,
        **{
            name: getattr(rollout, name).float()
            for name in ("old_logprobs", "old_entropy", "reference_logprobs", "advantages")
        },
    )
    objective = build_preset("erpo")
    actual = objective.shape_advantages(single)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, objective.shape_advantages(rollout).float(), rtol=1e-6, atol=1e-6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(case=cases())
def test_on_shaped_advantages_the_loss_is_grpos(case):
    options = {name: preset("erpo")[name] for name in LOSS_OPTIONS}
    baseline = build_preset("grpo", kl_coefficient=0.0, **options)
    assert_same(run(build_preset("erpo"), case), run(baseline, case), tolerance=1e-12)


def test_what_it_declares():
    objective = build_preset("erpo")
    assert objective.needs_reference and objective.shapes_advantages
    assert not objective.needs_entropy_gradient and not objective.needs_minibatch_statistics


@pytest.mark.parametrize("option", ["process_scale", "gate_sharpness", "process_std", "process_weight"])
def test_a_negative_weight_is_refused(option):
    with pytest.raises(UserError, match=rf"^algorithm.{option} = -1.0: it should be greater than or equal"):
        build_preset("erpo", **{option: -1.0})
    with pytest.raises(UserError, match=r"^algorithm.buckets = 0: it should be greater than or equal to 1"):
        build_preset("erpo", buckets=0)
