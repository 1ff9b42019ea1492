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
    micro_batch_size=4,
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # 8 ranks / 4 = 2 copies; 512 responses, 64 an update, 32 a copy, 8 micro-batches of 4
        ({}, Layout(8, 4, 1, 2, 512, 64, 32, 8)),
        # 16 ranks / (4 x 2) = 2 copies
        ({"nodes": 2, "pipeline": 2}, Layout(16, 4, 2, 2, 512, 64, 32, 8)),
        # one rank, one update, one micro-batch: nothing is divided
        (
            {"devices_per_node": 1, "tensor": 1, "updates_per_rollout": 1, "micro_batch_size": 512},
            Layout(1, 1, 1, 1, 512, 512, 512, 1),
        ),
        # three responses a prompt; 6 prompts, 3 updates of 2 groups: 6 responses, on 2 copies 3 each
        (
            {
                "prompts_per_step": 6,
                "responses_per_prompt": 3,
                "updates_per_rollout": 3,
                "micro_batch_size": 1,
            },
            Layout(8, 4, 1, 2, 18, 6, 3, 3),
        ),
        # a copy may hold a part of a group only: 1 group of 8 on 2 copies
        ({"prompts_per_step": 8, "micro_batch_size": 2}, Layout(8, 4, 1, 2, 64, 8, 4, 2)),
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
            {"devices_per_node": 12, "responses_per_prompt": 7, "updates_per_rollout": 64},
            "trainer.updates_per_rollout=64: leaves 7 responses an update (448 / 64), which cannot be shared "
            "by 3 copies "
            "of the model (12 ranks / 4); make rollout.prompts_per_step=64 x rollout.responses_per_prompt=7 "
            "a multiple "
            "of 192",
        ),
        (
            {"micro_batch_size": 5},
            "trainer.micro_batch_size=5: must divide the 32 responses that a copy of the model trains on in "
            "an update "
            "(step 512 / updates 8 / copies 2); set it to 4 or 8",
        ),
        # larger than what there is to divide (faults 24: it must not round to no micro-batch at all)
        (
            {"micro_batch_size": 64},
            "trainer.micro_batch_size=64: must divide the 32 responses that a copy of the model trains on in "
            "an update "
            "(step 512 / updates 8 / copies 2); set it to 32",
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
            for prompts, group, updates, micro in (
                (4, 2, 2, 1),
                (4, 4, 1, 2),
                (6, 2, 3, 4),
                (12, 3, 4, 3),
                (8, 8, 8, 8),
            ):
                try:
                    layout = plan_layout(
                        nodes=1, devices_per_node=devices, tensor=tensor, pipeline=pipeline,
                        prompts_per_step=prompts, responses_per_prompt=group,
                        updates_per_rollout=updates, micro_batch_size=micro,
                    )  # fmt: skip
                except UserError:
                    refused += 1
                    continue
                planned += 1
                assert layout.tensor * layout.pipeline * layout.data == devices
                assert layout.responses_per_step == prompts * group
                assert layout.micro_batches * micro * layout.data * updates == prompts * group
    assert planned and refused


def test_layout_prints_its_numbers():
    assert str(plan_layout(**PAPER)) == (
        "ranks      8 = 4 tensor x 1 pipeline x 2 data\n"
        "step       512 responses, 8 updates of 64\n"
        "update     32 responses a model copy in 8 micro-batches of 4"
    )


def test_layout_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_layout(**PAPER).data = 3
