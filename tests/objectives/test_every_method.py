"""What holds for each shipped preset, whatever its method."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from objectives.cases import (
    PRESETS,
    Case,
    assert_same,
    build_preset,
    make_case,
    on_meta,
    run,
    token_batch,
    totals,
)

NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_no_loss_and_no_gradient(name):
    """Faults 1, seen from the loss: A = 0 for a whole mini-batch, the policy far from the old one.

    But for KL-Cov's penalty, which some token pays in every mini-batch.
    """
    case = make_case(5, 4, 5, spread=3.0)
    options = {"kl_coefficient": 0.0} if name == "kl_cov" else {}
    result = run(build_preset(name, **options), replace(case, advantages=np.zeros_like(case.advantages)))
    assert result.loss == 0
    assert not result.logprob_gradient.any() and not result.entropy_gradient.any()
    assert result.metrics["ratio/clip_fraction"][0] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_first_update_follows_the_sign_of_the_advantage(name, sign):
    """At the old weights nothing is clipped: A > 0 makes every token likelier, A < 0 less likely."""
    case = make_case(6, 4, 5, spread=0.0)
    case = replace(case, advantages=np.full_like(case.advantages, sign))
    result = run(build_preset(name), case)
    assert (np.sign(-result.logprob_gradient[case.mask]) == sign).all()
    assert not result.logprob_gradient[~case.mask].any()
    assert result.metrics["ratio/clip_fraction"] == (0, case.mask.sum())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [50.0, -50.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_huge_log_ratios_stay_finite_with_their_gradient(name, size, advantage):
    """Faults 18, 19: eight tokens with such a log-ratio each, in the precision of production."""
    zeros, mask = np.zeros((1, 8)), np.ones((1, 8), bool)
    case = Case(zeros + size, zeros, zeros, zeros, zeros, zeros + advantage, mask, np.zeros(1))
    result = run(build_preset(name), case, dtype=torch.float32)
    assert np.isfinite(result.loss) and np.isfinite(result.logprob_gradient).all()
    assert all(np.isfinite(mean).all() for mean in result.metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_production_precision_stays_within_float32_rounding(name):
    case = make_case(13, 8, 12, shaped=True)
    objective = build_preset(name)
    assert_same(run(objective, case, dtype=torch.float32), run(objective, case), tolerance=5e-6)


@pytest.mark.parametrize("name", NAMES)
def test_no_step_waits_for_the_device(name):
    """On meta tensors nothing has a value: reading one, or mixing in another device, would raise."""
    case, objective = make_case(1, 3, 4), build_preset(name)
    batch = on_meta(token_batch(case))
    counts = totals(case, statistics=objective.needs_minibatch_statistics)
    if objective.needs_selection:
        draws = torch.zeros(batch.mask.shape, device="meta")
        assert objective.selection_scores(batch, counts.statistics, draws).shape == batch.mask.shape
    assert objective(batch, counts).loss.shape == ()
