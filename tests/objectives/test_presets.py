"""The shipped presets: they build, say what the papers say, and every option in them does something."""

import typing

import numpy as np
import pytest
import yaml
from objectives.cases import AGGREGATIONS, PRESETS, SHARED_KEYS, Case, make_case, preset, run_shaped

from tepo_nemo.objectives import AdvantageEstimator, build, known

FILES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(PRESETS.glob("*.yaml"))}


def test_the_presets_of_this_package_are_there():
    assert {
        "tepo", "tepo_no_kl", "grpo", "grpo_dapo", "dapo", "dr_grpo", "gspo", "gspo_token", "entropy_term",
        "gpg", "mpo", "erpo", "ep_grpo", "clip_cov", "kl_cov",
    } <= set(FILES)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_preset_builds_and_states_every_option(name):
    values = FILES[name]
    assert values.keys() >= SHARED_KEYS
    assert values["name"] in known()
    assert values["advantage"] in typing.get_args(AdvantageEstimator)
    assert isinstance(values["dynamic_sampling"], bool) and values["max_generation_batches"] == 10
    assert values["overlong_fraction"] == (0.2 if name == "dapo" else 0.0)
    objective = build(values["name"], preset(name))
    assert objective.model_dump() == preset(name)


def test_tepo_is_the_default_reading_of_the_paper():
    assert preset("tepo") == {
        "surrogate": "ppo",
        "ratio": "sequence-geometric",
        "ratio_gradient": "full",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_estimator": "k3",
        "kl_coefficient": 0.01,
        "kl_mask": "tepo",
        "entropy_drop": "entropy",
        "entropy_drop_tolerance": 0.0,
        "aggregation": "token-mean",
        "entropy_bonus": 0.0,
    }
    assert preset("tepo_no_kl") == preset("tepo") | {"kl_mask": "none"}
    assert FILES["tepo"]["dynamic_sampling"] and FILES["tepo"]["advantage"] == "group"


def test_grpo_is_the_form_of_its_paper_and_the_baseline_is_dapos():
    assert preset("grpo")["aggregation"] == "seq-mean-token-mean" and preset("grpo")["dual_clip"] is None
    assert preset("grpo_dapo") == {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 10.0,
        "kl_estimator": "k3",
        "kl_coefficient": 0.0,
        "aggregation": "token-mean",
    }
    assert FILES["grpo_dapo"]["name"] == "grpo" and FILES["grpo_dapo"]["dynamic_sampling"]


@pytest.mark.parametrize(
    ("options", "entropy_gradient", "statistics"),
    [
        ({}, False, False),
        ({"entropy_bonus": 0.01}, True, False),
        ({"entropy_drop": "covariance"}, False, True),
        ({"entropy_drop": "covariance", "kl_mask": "all"}, False, False),
        ({"entropy_drop": "covariance", "kl_mask": "none"}, False, False),
        ({"entropy_drop": "surprisal"}, False, False),
    ],
)
def test_tepo_declares_only_what_its_options_need(options, entropy_gradient, statistics):
    objective = build("tepo", preset("tepo") | options)
    assert objective.needs_entropy_gradient is entropy_gradient
    assert objective.needs_minibatch_statistics is statistics
    assert objective.needs_reference is False


# What each option may be set to; where a value is not the preset's own, it must change something.
WIDTHS = [0.0, 0.2, 0.5, float("inf")]
OTHERS = {
    ("tepo", "surrogate"): ["ppo", "printed"],
    ("tepo", "ratio"): ["token", "sequence-geometric", "sequence-product", "none"],
    ("tepo", "ratio_gradient"): ["full", "stop_gradient"],
    ("tepo", "clip_low"): WIDTHS,
    ("tepo", "clip_high"): WIDTHS,
    ("tepo", "kl_estimator"): ["k1", "k2", "k3", "abs"],
    ("tepo", "kl_coefficient"): [0.0, 1.0],
    ("tepo", "kl_mask"): ["tepo", "all", "none"],
    ("tepo", "entropy_drop"): ["entropy", "surprisal", "covariance"],
    ("tepo", "entropy_drop_tolerance"): [0.5],
    ("tepo", "aggregation"): AGGREGATIONS,
    ("tepo", "entropy_bonus"): [0.01],
    ("grpo", "clip_low"): WIDTHS,
    ("grpo", "clip_high"): WIDTHS,
    ("grpo", "dual_clip"): [None, 1.5],
    ("grpo", "kl_estimator"): ["k1", "k2", "k3", "abs"],
    ("grpo", "kl_coefficient"): [0.0, 1.0],
    ("grpo", "aggregation"): AGGREGATIONS,
    ("gspo", "ratio_gradient"): ["full", "stop_gradient"],
    ("gspo", "clip_low"): WIDTHS,
    ("gspo", "clip_high"): WIDTHS,
    ("gspo", "aggregation"): AGGREGATIONS,
    ("gpg", "aggregation"): AGGREGATIONS,
    ("entropy_term", "entropy_coefficient"): [0.0, 0.1],
    ("entropy_term", "advantage_divisor"): [1.1, 4.0],
    ("entropy_term", "clip_low"): WIDTHS,
    ("entropy_term", "clip_high"): WIDTHS,
    ("entropy_term", "dual_clip"): [None, 1.5],
    ("entropy_term", "aggregation"): AGGREGATIONS,
    ("mpo", "window"): [1, 2],
    ("mpo", "next_weight"): [0.0, 0.2],
    ("mpo", "weight_decay"): [0.0, 1.0],
    ("mpo", "clip_low"): WIDTHS,
    ("mpo", "clip_high"): WIDTHS,
    ("mpo", "aggregation"): AGGREGATIONS,
    ("clip_cov", "selected_fraction"): [2e-4, 0.02],
    ("clip_cov", "covariance_low"): [-1.0, 0.5],
    ("clip_cov", "covariance_high"): [1.5, 2.0],
    ("clip_cov", "clip_low"): [0.0, 0.2, 0.5],  # of 1 and more, none cuts a ratio
    ("clip_cov", "clip_high"): WIDTHS,
    ("clip_cov", "aggregation"): AGGREGATIONS,
    ("kl_cov", "selected_fraction"): [0.1, 1.0],
    ("kl_cov", "kl_coefficient"): [0.0, 0.1],
    ("kl_cov", "aggregation"): AGGREGATIONS,
} | {
    (method, option): values
    for method in ("erpo", "ep_grpo")
    for option, values in {
        "process_scale": [0.0, 1e-6],  # its scale cancels but for the 1e-6 beside the standard deviation
        "gate_sharpness": [0.0, 3.0],
        "buckets": [1, 3],
        "process_std": [0.0, 0.5],
        "process_weight": [0.0, 1.0],
        "clip_low": WIDTHS,
        "clip_high": WIDTHS,
        "dual_clip": [1.5],
        "aggregation": AGGREGATIONS,
    }.items()
}
# Without these, an option has nothing to act on: a KL that is off has no weight, an empty mask no rule, and
# of a small mini-batch only one token is selected.
SWITCHED_ON = {
    "tepo_no_kl": {"kl_mask": "tepo"},
    "clip_cov": {"selected_fraction": 0.5},
    **dict.fromkeys(("grpo", "grpo_dapo", "dapo", "dr_grpo"), {"kl_coefficient": 0.04}),
}


def test_the_list_of_options_is_complete():
    """A new option or choice must join the test below."""
    for name in {values["name"] for values in FILES.values()}:
        fields = type(build(name, preset(name))).model_fields
        assert {option for owner, option in OTHERS if owner == name} == fields.keys()
        for option, field in fields.items():
            if typing.get_origin(field.annotation) is typing.Literal:
                assert set(OTHERS[name, option]) == set(typing.get_args(field.annotation))


def lively_case() -> Case:
    """Both signs of A, varying inside a response; ratios beyond all clips; uneven groups and responses.

    Of its 128 tokens some are candidates of Clip-Cov, on either side of the values below.
    """
    return make_case(17, 24, 8, spread=0.8, density=0.6, shaped=True)


def changes() -> list[tuple[str, str, object]]:
    return [
        (name, option, value)
        for name, values in FILES.items()
        for (method, option), others in OTHERS.items()
        for value in others
        if method == values["name"] and value != (values | SWITCHED_ON.get(name, {}))[option]
    ]


@pytest.mark.parametrize(("name", "option", "value"), changes())
def test_every_option_is_live(name, option, value):
    """Faults 35: an option that is accepted and has no effect."""
    method, options = FILES[name]["name"], preset(name) | SWITCHED_ON.get(name, {})
    before = run_shaped(build(method, options), lively_case())
    after = run_shaped(build(method, options | {option: value}), lively_case())
    assert (
        not np.isclose(after.loss, before.loss, rtol=1e-9)
        or not np.allclose(after.logprob_gradient, before.logprob_gradient, rtol=1e-9, atol=1e-12)
        or not np.allclose(after.entropy_gradient, before.entropy_gradient)
    )
