"""Losses, gradients and advantages beside verl and TRL, live on the same tensors; and how far they differ.

Both are optional: `pip install --no-deps verl==0.9.1 trl==1.16.0`, or the folder that TEPO_NEMO_PEERS names.
"""

import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from objectives.cases import MAX_LENGTH, Case, build_preset, make_case, preset, run, select, totals
from support.peer_losses import PeerResult, trl_loss, verl, verl_loss, verl_weights

from tepo_nemo.bench import peers
from tepo_nemo.objectives import group_advantages
from tepo_nemo.objectives.divergence import divergence
from tepo_nemo.rollout.correction import RolloutCorrection

# Those that verl has; group-token-mean is ours alone.
AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
NO_DUAL_CLIP = 1e12  # verl's cannot be switched off
EPSILON = 1e-7  # verl adds 1e-8 to the length of a response and to the number of tokens


@pytest.fixture
def needs_verl():
    _skip_if_absent("verl")


@pytest.fixture
def needs_trl():
    _skip_if_absent("trl")


def _skip_if_absent(package: str) -> None:
    try:
        peers.folder_of(package)
    except peers.Absent as reason:
        pytest.skip(f"{package}: {reason}")


with_verl = pytest.mark.usefixtures("needs_verl")
with_trl = pytest.mark.usefixtures("needs_trl")


def lively_cases(shaped: bool) -> list[Case]:
    """Ratios beyond every clip, both signs of A, lengths that differ; in one of them an empty response."""
    cases = [make_case(seed, 8, 6, spread=0.8, shaped=shaped) for seed in range(6)]
    mask = cases[0].mask.copy()
    mask[3] = False
    return [replace(cases[0], mask=mask), *cases[1:]]


def assert_agree(ours, theirs: PeerResult, tolerance: float = EPSILON) -> None:
    assert theirs.loss == pytest.approx(ours.loss, rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(theirs.gradient, ours.logprob_gradient, rtol=tolerance, atol=tolerance)


def distance(ours, theirs: PeerResult) -> float:
    """Between the gradients, as a share of ours."""
    return float(
        np.linalg.norm(ours.logprob_gradient - theirs.gradient) / np.linalg.norm(ours.logprob_gradient)
    )


# --- losses beside verl ---------------------------------------------------------------------------


@with_verl
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["grpo", "grpo_dapo", "dapo", "dr_grpo"])
def test_grpo_and_its_forms_are_verls(name, aggregation):
    """Each preset's own aggregation is among these; so are its clip and its dual clip."""
    options = preset(name)
    for case in lively_cases(shaped=True):
        ours = run(build_preset(name, aggregation=aggregation), case)
        theirs = verl_loss(
            "vanilla",
            case,
            aggregation,
            clip_ratio_low=options["clip_low"],
            clip_ratio_high=options["clip_high"],
            clip_ratio_c=options["dual_clip"] or NO_DUAL_CLIP,
        )
        assert_agree(ours, theirs)
        cut = theirs.metrics["actor/pg_clipfrac"] + theirs.metrics["actor/pg_clipfrac_lower"]
        assert cut * len(case.valid) == pytest.approx(ours.metrics["ratio/clip_fraction"][0], rel=EPSILON)
        assert cut > 0


@with_verl
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gspo_is_verls(aggregation):
    """verl has the form of GSPO-token: GSPO's too, in value and gradient, while A is one a response."""
    for shaped, names in ((False, ["gspo", "gspo_token"]), (True, ["gspo_token"])):
        for case in lively_cases(shaped):
            theirs = verl_loss("gspo", case, aggregation, clip_ratio_low=3e-4, clip_ratio_high=4e-4)
            for name in names:
                assert_agree(run(build_preset(name, aggregation=aggregation), case), theirs)


@with_verl
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_token_weights_are_verls(aggregation):
    """With GSPO's full gradient, too: verl's form of its ratio is the one in which tokens have weights."""
    clips = dict(clip_ratio_low=0.2, clip_ratio_high=0.2)
    for case in lively_cases(shaped=False):
        weights = np.random.default_rng(2).uniform(0, 2, case.mask.shape).round(1)
        theirs = verl_loss("vanilla", case, aggregation, weights=weights, clip_ratio_c=NO_DUAL_CLIP, **clips)
        options = dict(aggregation=aggregation, clip_low=0.2, clip_high=0.2)
        assert_agree(run(build_preset("grpo", dual_clip=None, **options), case, weights=weights), theirs)
        theirs = verl_loss("gspo", case, aggregation, weights=weights, **clips)
        for name in ("gspo", "gspo_token"):
            assert_agree(run(build_preset(name, **options), case, weights=weights), theirs)


@with_verl
@pytest.mark.parametrize(
    ("kind", "threshold"), [("truncated", 2.0), ("truncated", 1.1), ("icepop", "0.5_5.0")]
)
def test_weights_of_tokens_are_verls(kind, threshold):
    low, _, high = str(threshold).partition("_")
    bounds = {"truncation": threshold, "icepop_low": 0.5, "icepop_high": 5.0}
    if kind == "icepop":
        bounds |= {"truncation": 2.0, "icepop_low": float(low), "icepop_high": float(high)}
    random = torch.Generator().manual_seed(6)
    old, sampled = (torch.randn(8, 16, generator=random, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(8, 16, generator=random) < 0.8
    ours = RolloutCorrection(kind, response_gap_limit=None, **bounds).weights(old, sampled, mask)
    torch.testing.assert_close(ours, verl_weights(old - sampled, mask, threshold), rtol=0, atol=0)
    assert len(ours.unique()) > 10


@with_verl
def test_gspo_differs_from_verls_where_advantages_vary_inside_a_response():
    """The whole ratio has a gradient through every token. A clip that cuts nothing leaves all of them."""
    case = lively_cases(shaped=True)[1]
    theirs = verl_loss("gspo", case, "token-mean", clip_ratio_low=1.0, clip_ratio_high=1e9)
    options = dict(aggregation="token-mean", clip_low=1.0, clip_high=math.inf)
    assert distance(run(build_preset("gspo", **options), case), theirs) > 0.1
    assert distance(run(build_preset("gspo_token", **options), case), theirs) < EPSILON


@with_verl
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gpg_is_verls(aggregation):
    for case in lively_cases(shaped=True):
        assert_agree(
            run(build_preset("gpg", aggregation=aggregation), case), verl_loss("gpg", case, aggregation)
        )


@with_verl
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("fraction", [2e-4, 0.1, 1.0])
def test_clip_cov_is_verls_on_one_micro_batch(fraction, aggregation):
    """With our draws in place of its random permutation of the candidates."""
    selections = []
    for case in lively_cases(shaped=True):
        options = dict(selected_fraction=fraction, covariance_low=0.2, covariance_high=2.0, clip_high=0.5)
        objective = build_preset("clip_cov", aggregation=aggregation, **options)
        everything = build_preset("clip_cov", **(options | {"selected_fraction": 1.0}))
        candidates = select(everything, case, totals(case, statistics=True))
        order = torch.tensor(case.draws[candidates]).argsort(descending=True)
        with mock.patch.object(torch, "randperm", lambda count, order=order: order[:count]):
            theirs = verl_loss(
                "clip_cov",
                case,
                aggregation,
                clip_ratio_low=1.0,
                clip_ratio_high=0.5,
                clip_cov_ratio=fraction,
                clip_cov_lb=0.2,
                clip_cov_ub=2.0,
            )
        assert_agree(run(objective, case), theirs)
        selections.append(int(select(objective, case, totals(case, statistics=True)).sum()))
    assert max(selections) > (1 if fraction > 0.01 else 0)


@with_verl
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("fraction", [0.002, 0.1, 1.0])
def test_kl_cov_is_verls_on_one_micro_batch(fraction, aggregation):
    for case in lively_cases(shaped=True):
        ours = run(build_preset("kl_cov", selected_fraction=fraction, aggregation=aggregation), case)
        assert_agree(ours, verl_loss("kl_cov", case, aggregation, kl_cov_ratio=fraction, ppo_kl_coef=1.0))


@with_verl
def test_verl_selects_in_each_micro_batch():
    """Of 8 responses in 8 micro-batches, KL-Cov's share of 0.2 per cent is one token each, not one of all."""
    case = make_case(2, 8, 6, spread=0.8, density=1.0, shaped=True)
    ours = run(build_preset("kl_cov"), case)
    assert ours.metrics["mask/fraction"] == (1, 48)
    options = dict(kl_cov_ratio=0.002, ppo_kl_coef=1.0)
    parts = [
        verl_loss("kl_cov", case.rows(slice(row, row + 1)), "token-mean", whole=case, **options)
        for row in range(8)
    ]
    without = run(build_preset("kl_cov", kl_coefficient=0.0), case)
    gradient = np.concatenate([part.gradient for part in parts])
    assert (np.abs(gradient - without.logprob_gradient) > EPSILON).sum() == 8
    assert (np.abs(ours.logprob_gradient - without.logprob_gradient) > EPSILON).sum() == 1
    assert_agree(ours, verl_loss("kl_cov", case, "token-mean", **options))


# --- losses beside TRL ----------------------------------------------------------------------------

FORMS = {
    "grpo": ("grpo", {}),
    "grpo_dapo": ("dapo", {"dual_clip": 10.0}),
    "dapo": ("dapo", {}),
    "dr_grpo": ("dr_grpo", {}),
    "gspo": ("grpo", {"level": "sequence"}),
}


@with_trl
@pytest.mark.parametrize("name", FORMS)
def test_grpo_and_its_forms_are_trls(name):
    """TRL's sequence level has GSPO's gradient, through every token of the ratio."""
    loss_type, options = FORMS[name]
    for case in lively_cases(shaped=False)[1:]:
        clips = dict(clip_low=preset(name)["clip_low"], clip_high=preset(name)["clip_high"])
        assert_agree(run(build_preset(name), case), trl_loss(loss_type, case, **clips, **options), 1e-12)


@with_trl
def test_the_kl_to_a_reference_is_trls():
    for case in lively_cases(shaped=False)[1:]:
        ours = run(build_preset("grpo", kl_coefficient=0.04), case)
        theirs = trl_loss("grpo", case, clip_low=0.2, clip_high=0.2, kl_coefficient=0.04)
        assert_agree(ours, theirs, 1e-12)
        mean = ours.metrics["kl/reference_mean"]
        assert theirs.metrics["kl"] == pytest.approx(mean[0] / mean[1])


@with_trl
@pytest.mark.parametrize(
    ("name", "loss_type", "factor"),
    [("grpo", "grpo", 7 / 8), ("dr_grpo", "dr_grpo", 7 / 8), ("dapo", "dapo", 1)],
)
def test_trl_counts_a_response_without_tokens(name, loss_type, factor):
    """One of 8 is masked: TRL's mean over responses has 8 of them, ours 7; a mean over tokens is the same."""
    case = lively_cases(shaped=False)[0]
    assert len({row for row, _ in case.valid}) == 7
    ours = run(build_preset(name), case)
    clips = dict(clip_low=preset(name)["clip_low"], clip_high=preset(name)["clip_high"])
    theirs = trl_loss(loss_type, case, **clips)
    np.testing.assert_allclose(theirs.gradient, factor * ours.logprob_gradient, rtol=1e-12)


def one_token(log_ratio: float) -> Case:
    """With A = -1, so that no upper clip bounds the ratio."""
    one, zero = np.ones((1, 1)), np.zeros((1, 1))
    return Case(log_ratio * one, zero, zero, zero, zero, -one, one == 1, np.zeros(1))


@with_verl
@pytest.mark.parametrize(
    ("name", "verls_name", "bound"),
    [
        ("grpo", "vanilla", 20),
        ("gspo", "gspo", 10),
        ("clip_cov", "clip_cov", None),
        ("kl_cov", "kl_cov", None),
    ],
)
def test_verl_bounds_a_huge_ratio_elsewhere_or_not_at_all(name, verls_name, bound):
    """A log-ratio of 25: e^20 and no gradient here; in verl e^20, e^10 or e^25, which keeps its gradient."""
    case = one_token(25.0)
    ours = run(build_preset(name, **({"kl_coefficient": 0.0} if name == "kl_cov" else {})), case)
    options = dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=NO_DUAL_CLIP)
    options |= dict(clip_cov_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0, kl_cov_ratio=2e-3, ppo_kl_coef=0.0)
    theirs = verl_loss(verls_name, case, "token-mean", **options)
    assert (ours.loss, ours.logprob_gradient.item()) == (pytest.approx(math.exp(20)), 0)
    expected = (math.exp(25), math.exp(25)) if bound is None else (math.exp(bound), 0)
    assert (theirs.loss, theirs.gradient.item()) == pytest.approx(expected)


@with_verl
def test_verls_dual_clip_is_on():
    """A ratio of 5 with A < 0 counts 3 unless verl is told otherwise; in the preset `grpo`, 5."""
    case = one_token(math.log(5))
    theirs = verl_loss("vanilla", case, "token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2)
    assert (run(build_preset("grpo"), case).loss, theirs.loss) == pytest.approx((5, 3))
    assert run(build_preset("grpo", dual_clip=3.0), case).loss == pytest.approx(3)


@with_verl
def test_verl_divides_by_the_padded_width_unless_told():
    """Of seq-mean-token-sum-norm; ours by the longest response that is allowed."""
    case = make_case(1, 4, 6, density=1.0)
    ours = run(build_preset("gpg", aggregation="seq-mean-token-sum-norm"), case)
    losses = torch.tensor(-case.advantages * case.logprobs)
    theirs = verl().agg_loss(losses, torch.tensor(case.mask), "seq-mean-token-sum-norm")
    assert theirs.item() * 6 == pytest.approx(ours.loss * MAX_LENGTH)


@with_trl
def test_trl_does_not_bound_a_huge_ratio():
    theirs = trl_loss("grpo", one_token(25.0), clip_low=0.2, clip_high=0.2)
    assert (theirs.loss, theirs.gradient.item()) == pytest.approx((math.exp(25), math.exp(25)))


# --- estimators of the KL --------------------------------------------------------------------------

VERLS_NAMES = {"k1": "k1+", "k2": "k2", "k3": "k3", "abs": "abs"}


def kl_of(estimate, log_ratios: list[float]) -> tuple[list[float], list[float]]:
    d = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    values = estimate(d)
    (slopes,) = torch.autograd.grad(values.sum(), d)
    return values.tolist(), slopes.tolist()


@with_verl
@pytest.mark.parametrize("estimator", VERLS_NAMES)
def test_kl_estimators_are_verls(estimator):
    """Values and derivatives. Our k1 is verl's k1+: k1's value with k2's derivative."""
    log_ratios = [-2.3, -1.0, -1e-3, 0.0, 0.5, 3.0, 10.5]
    ours = kl_of(lambda d: divergence(d, estimator), log_ratios)
    theirs = kl_of(lambda d: verl().kl_penalty(d, torch.zeros_like(d), VERLS_NAMES[estimator]), log_ratios)
    np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


@with_verl
def test_where_kl_estimators_differ_from_verls():
    """verl's k1 has the derivative 1 everywhere, its k3 ends at 10, its k2 nowhere; ours end at d = +-20."""
    kl_penalty = verl().kl_penalty
    assert kl_of(lambda d: kl_penalty(d, torch.zeros_like(d), "k1"), [-1.0, 0.0, 2.0])[1] == [1, 1, 1]
    assert kl_of(lambda d: divergence(d, "k1"), [-1.0, 0.0, 2.0])[1] == [-1, 0, 2]
    assert kl_of(lambda d: kl_penalty(d, torch.zeros_like(d), "k3"), [-3.0]) == ([10], [0])
    value, slope = kl_of(lambda d: divergence(d, "k3"), [-3.0])
    assert value == pytest.approx([math.exp(3) - 4]) and slope == pytest.approx([1 - math.exp(3)])
    assert kl_of(lambda d: kl_penalty(d, torch.zeros_like(d), "k2"), [30.0])[0] == [450]
    assert kl_of(lambda d: divergence(d, "k2"), [30.0])[0] == [200]


# --- advantages -----------------------------------------------------------------------------------

ESTIMATORS = {
    "group": ("grpo", {}),
    "mean": ("grpo", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("rloo", {}),
    "gpg_nonzero": ("gpg", {}),
}


def verls_advantages(name: str, rewards: list[float], groups: list[int], **options) -> list[float]:
    advantages, _ = getattr(verl(), f"compute_{name}_outcome_advantage")(
        torch.tensor(rewards, dtype=torch.float64)[:, None],
        torch.ones(len(rewards), 1),
        np.array(groups),
        **options,
    )
    return advantages[:, 0].tolist()


def our_advantages(estimator: str, rewards: list[float], groups: list[int]) -> list[float]:
    tensor = torch.tensor(rewards, dtype=torch.float64)
    return group_advantages(tensor, torch.tensor(groups), torch.ones(len(rewards)).bool(), estimator).tolist()


@with_verl
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_are_verls(estimator):
    """Groups of 2 to 5 in any order, one of them without spread."""
    rng = np.random.default_rng(4)
    groups = rng.permutation([0] * 2 + [1] * 3 + [2] * 4 + [3] * 5).tolist()
    rewards = [1.0 if group == 2 else float(rng.integers(0, 3)) / 2 for group in groups]
    name, options = ESTIMATORS[estimator]
    theirs = verls_advantages(name, rewards, groups, **options)
    np.testing.assert_allclose(our_advantages(estimator, rewards, groups), theirs, rtol=1e-5, atol=1e-6)


@with_verl
def test_where_advantages_differ_from_verls():
    """The scale of GPG, a group of one, and equal rewards whose mean is rounded."""
    rewards, groups = [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]
    assert our_advantages("gpg", rewards, groups) == [1, -1, 0, 0]  # alpha = 4 / 2 in groups with spread
    assert verls_advantages("gpg", rewards, groups) == pytest.approx([2 / 3, -2 / 3, 0, 0])  # 4 / 3 not 0
    for estimator in ("group", "rloo"):
        assert our_advantages(estimator, [1.0], [0]) == [0]
        name, options = ESTIMATORS[estimator]
        assert verls_advantages(name, [1.0], [0], **options) == pytest.approx([1], rel=1e-5)
    assert our_advantages("mean", [0.1] * 3, [0] * 3) == [0, 0, 0]
    assert 0 < abs(verls_advantages("grpo", [0.1] * 3, [0] * 3, norm_adv_by_std_in_grpo=False)[0]) < 1e-16
