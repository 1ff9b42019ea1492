import dataclasses

import pytest

from tepo_nemo.config.layout import Layout, plan_layout
from tepo_nemo.errors import UserError

PAPER = dict(
    nodes=1,
    devices_per_node=8,
    tensor=4,
    pipeline=1,
    prompts_per_step=64,
    responses_per_prompt=8,
    updates_per_rollout=8,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # 8 ranks / 4 = 2 copies; 512 responses, 64 an update
        ({}, Layout(8, 4, 1, 2, 512, 64)),
        # 16 ranks / (4 x 2) = 2 copies
        ({"nodes": 2, "pipeline": 2}, Layout(16, 4, 2, 2, 512, 64)),
        # one rank, one update: nothing is divided
        ({"devices_per_node": 1, "tensor": 1, "updates_per_rollout": 1}, Layout(1, 1, 1, 1, 512, 512)),
        # three responses a prompt; 6 prompts, 3 updates of 2 groups
        (
            {"prompts_per_step": 6, "responses_per_prompt": 3, "updates_per_rollout": 3},
            Layout(8, 4, 1, 2, 18, 6),
        ),
        # a copy may train on a part of a group only, and on other numbers of responses than another copy
        ({"prompts_per_step": 8}, Layout(8, 4, 1, 2, 64, 8)),
        ({"prompts_per_step": 8, "devices_per_node": 12}, Layout(12, 4, 1, 3, 64, 8)),
    ],
)
def test_layout_by_hand_count(change, expected):
    assert plan_layout(**PAPER | change) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"devices_per_node": 6},
            "hardware.nodes=1 x hardware.devices_per_node=6: the number of ranks, 6, is no multiple of the 4 "
            "that hold "
            "a copy of the model (model.tensor_model_parallel_size=4 x "
            "model.pipeline_model_parallel_size=1); make the "
            "ranks a multiple of 4",
        ),
        # fewer ranks than one copy needs is the same mistake
        (
            {"devices_per_node": 2},
            "hardware.nodes=1 x hardware.devices_per_node=2: the number of ranks, 2, is no multiple of the 4 "
            "that hold "
            "a copy of the model (model.tensor_model_parallel_size=4 x "
            "model.pipeline_model_parallel_size=1); make the "
            "ranks a multiple of 4",
        ),
        (
            {"updates_per_rollout": 7},
            "trainer.updates_per_rollout=7: must divide rollout.prompts_per_step=64, so that an update "
            "trains on whole "
            "groups; set it to 4 or 8",
        ),
        (
            {"updates_per_rollout": 128},
            "trainer.updates_per_rollout=128: must divide rollout.prompts_per_step=64, so that an update "
            "trains on whole "
            "groups; set it to 64",
        ),
        (
            {"devices_per_node": 36, "prompts_per_step": 8},
            "trainer.updates_per_rollout=8: leaves 8 responses an update (64 / 8) for 9 copies of the model "
            "(36 ranks / 4); make rollout.prompts_per_step=8 x rollout.responses_per_prompt=8 at least 72",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(change, message):  # faults 24, 25
    with pytest.raises(UserError) as refusal:
        plan_layout(**PAPER | change)
    assert str(refusal.value) == message


def test_every_division_of_a_planned_layout_is_exact():
    """Over a grid: either refused, or the parts multiply back to the whole."""
    planned = refused = 0
    for devices in (1, 2, 3, 4, 6, 8):
        for tensor, pipeline in ((1, 1), (2, 1), (1, 2), (2, 2), (3, 1)):
            for prompts, group, updates in ((4, 2, 2), (4, 4, 1), (6, 2, 3), (12, 3, 4), (8, 8, 8)):
                try:
                    layout = plan_layout(
                        nodes=1, devices_per_node=devices, tensor=tensor, pipeline=pipeline,
                        prompts_per_step=prompts, responses_per_prompt=group, updates_per_rollout=updates,
                    )  # fmt: skip
                except UserError:
                    refused += 1
                    continue
                planned += 1
                assert layout.tensor * layout.pipeline * layout.data == devices
                assert layout.responses_per_step == prompts * group
                assert layout.responses_per_update * updates == prompts * group
    assert planned and refused


def test_layout_prints_its_numbers():
    assert str(plan_layout(**PAPER)) == (
        "ranks      8 = 4 tensor x 1 pipeline x 2 data\nstep       512 responses, 8 updates of 64"
    )


def test_layout_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_layout(**PAPER).data = 3
