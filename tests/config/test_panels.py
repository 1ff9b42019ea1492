"""The panels of the paper's Table 3: each is TEPO but for the options that the table names."""

import pytest

from tepo_nemo.config.load import load_config
from tepo_nemo.config.presets import choices
from tepo_nemo.errors import UserError

ON_ALL = {"kl_mask": "all"}
PANELS = {
    "panel_a_beta_1": ON_ALL | {"kl_coefficient": 1.0},
    "panel_a_beta_0_1": ON_ALL | {"kl_coefficient": 0.1},
    "panel_a_beta_0_01": ON_ALL | {"kl_coefficient": 0.01},
    "panel_a_beta_0_001": ON_ALL | {"kl_coefficient": 0.001},
    "panel_b_entropy_bonus": {"kl_mask": "none", "entropy_bonus": 0.001},
    "panel_c_token": {"ratio": "token"},
    "panel_c_sequence_geometric": {"ratio": "sequence-geometric"},
    "panel_c_sequence_product": {"ratio": "sequence-product"},
    "panel_c_none": {"ratio": "none"},
    "panel_d_token_mean": {"aggregation": "token-mean"},
    "panel_d_seq_mean_token_mean": {"aggregation": "seq-mean-token-mean"},
    "panel_d_seq_mean_token_sum": {"aggregation": "seq-mean-token-sum"},
    "panel_d_seq_mean_token_sum_norm": {"aggregation": "seq-mean-token-sum-norm"},
    "panel_e_masked_kl": {"kl_mask": "tepo"},
}
# Rows of the table that are TEPO itself.
TEPO_ITSELF = {"panel_c_sequence_geometric", "panel_d_token_mean", "panel_e_masked_kl"}


def test_these_are_all_panels():
    assert {name for name in choices()["experiment"] if name.startswith("panel_")} == set(PANELS)


@pytest.mark.parametrize("base", [[], ["experiment=toy_cpu"]], ids=["alone", "on toy_cpu"])
@pytest.mark.parametrize("name", PANELS)
def test_a_panel_is_tepo_but_for_its_options(name, base):
    """As one word, on top of any model and data."""
    tepo = load_config([*base, "algorithm=tepo"])
    panel = load_config([*base, f"experiment={name}"])
    expected = tepo.algorithm.model_dump() | PANELS[name]
    assert panel.algorithm.model_dump() == expected
    assert panel.model_dump(exclude={"algorithm"}) == tepo.model_dump(exclude={"algorithm"})
    assert (panel == tepo) == (name in TEPO_ITSELF)


def test_experiments_add_up_and_the_later_one_has_the_last_word():
    words = load_config(["experiment=panel_b_entropy_bonus", "experiment=toy_cpu"])
    assert (words.layout.world, words.algorithm.options["kl_mask"]) == (2, "tepo")  # toy_cpu chooses tepo
    words = load_config(["experiment=toy_cpu", "experiment=panel_b_entropy_bonus"])
    assert (words.layout.world, words.algorithm.options["kl_mask"]) == (2, "none")
    assert words == load_config(["experiment=[toy_cpu,panel_b_entropy_bonus]"])
    assert load_config(["experiment=null", "experiment=[]"]) == load_config()


def test_a_choice_and_a_key_beat_the_panel():
    changed = load_config(
        ["algorithm=tepo_no_kl", "experiment=panel_d_seq_mean_token_sum", "algorithm.clip_low=0.1"]
    )
    options = changed.algorithm.options
    assert (options["kl_mask"], options["aggregation"], options["clip_low"]) == (
        "none",
        "seq-mean-token-sum",
        0.1,
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment=[toy_cpu,panel_d_token]"], "unknown experiment; did you mean panel_c_token?"),
        (["experiment=toy_cpu", "experiment=panel_a"], "experiment=panel_a: unknown experiment; "),
        (["experiment=panel_c_token", "algorithm=grpo"], "algorithm.ratio: is no option of grpo"),
        (["algorithm=[grpo,tepo]"], "algorithm=[grpo,tepo]: unknown algorithm"),
    ],
)
def test_what_cannot_be_combined_is_refused(overrides, message):
    with pytest.raises(UserError) as refusal:
        load_config(overrides)
    assert message in str(refusal.value)


def test_a_study_is_no_group_of_presets():
    assert "study" not in choices()
    with pytest.raises(UserError, match="^study: unknown key"):
        load_config(["study=paper_mini"])
