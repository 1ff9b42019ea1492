"""The proposed layout fits, and none that is smaller does."""

import pytest

from tepo_nemo.config.load import load_config
from tepo_nemo.errors import UserError
from tepo_nemo.planning.fit import FEWEST_ROWS, fit
from tepo_nemo.planning.plan import make_plan

MODELS = ["qwen2_5_7b", "qwen2_5_14b", "qwen3_14b", "r1_distill_llama_8b", "mistral_7b_instruct"]


def config(model: str, *overrides: str):
    return load_config([f"experiment=paper_{model}", *overrides], files=False)


@pytest.mark.parametrize("memory", ["79.1", "40", "24"])
@pytest.mark.parametrize("model", MODELS)
def test_the_proposal_fits_as_overrides(model, memory):
    given = f"hardware.device_memory_gib={memory}"
    plan, proposed = fit(config(model, given))
    again = make_plan(config(model, given, *proposed))
    assert again.config == plan.config
    assert again.fits and again.rows >= min(FEWEST_ROWS, 512 // again.config.layout.data)


@pytest.mark.parametrize("model", MODELS)
def test_no_smaller_layout_fits(model):
    """By trying all copies of fewer GPUs on one node, at the fewest sequences that a rollout may have."""
    plan, _ = fit(config(model))
    layout = plan.config.layout
    assert plan.config.hardware.nodes == 1
    for tensor, pipeline in [(1, 1), (2, 1), (1, 2), (1, 4), (2, 2), (4, 1), (8, 1), (4, 2), (2, 4)]:
        if tensor * pipeline >= layout.tensor * layout.pipeline:
            continue
        smaller = make_plan(
            config(
                model,
                f"model.tensor_model_parallel_size={tensor}",
                f"model.pipeline_model_parallel_size={pipeline}",
                f"model.sequence_parallel={str(tensor > 1).lower()}",
                f"rollout.batch_size={min(FEWEST_ROWS, 512 * tensor * pipeline // 8)}",
            )
        )
        assert not smaller.fits, (tensor, pipeline)


def test_a_layout_that_fits_already_may_shrink_but_the_smallest_stays():
    plan, proposed = fit(config("qwen2_5_7b"))
    assert proposed
    _, again = fit(plan.config)
    assert again == []


def test_nothing_is_recomputed_without_need():
    plan, proposed = fit(
        config("qwen2_5_7b", "model.tensor_model_parallel_size=1", "model.sequence_parallel=false")
    )
    assert plan.config.model.activations_checkpoint_granularity is None
    assert "model.activations_checkpoint_granularity=null" in proposed


def test_more_nodes_where_one_is_too_small():
    plan, proposed = fit(config("qwen2_5_14b", "hardware.device_memory_gib=24"))
    assert plan.config.hardware.nodes > 1
    assert f"hardware.nodes={plan.config.hardware.nodes}" in proposed


def test_where_nothing_fits_the_numbers_are_told():
    with pytest.raises(UserError) as refusal:
        fit(config("qwen2_5_14b", "hardware.device_memory_gib=6"))
    message = str(refusal.value)
    assert message.startswith(
        "hardware.device_memory_gib=6: no layout on up to 64 nodes of 8 fits; the nearest, "
    )
    assert "GiB of a GPU, and 1.0 GiB are there beside the 5 GiB that are reserved" in message


def test_without_a_memory_there_is_nothing_to_fit_into():
    with pytest.raises(UserError, match=r"^hardware.device_memory_gib=null: there is nothing to fit into"):
        fit(config("qwen2_5_7b", "hardware.device_memory_gib=null"))


def test_with_servers_an_update_is_what_must_fit():
    plan, _ = fit(config("qwen2_5_7b", "rollout=server"))
    beside, _ = fit(config("qwen2_5_7b"))
    memory = plan.stages[plan.worst]
    assert memory.update <= plan.room and memory.rollout == memory.resident
    assert plan.config.rollout.batch_size is None
    assert plan.config.layout.data >= beside.config.layout.data
