"""Several sequences in one row give what padded rows give.

Megatron-core's own attention has no form for that: one that keeps sequences apart is put in its place here.
Rotary embeddings, gradients, pipeline stages and sequence parallelism are the real ones.
"""

from collections.abc import Callable

import pytest
import torch
from support.gather import own_gradients, whole
from support.layouts import Given, assert_close
from support.synthetic import RESPONSES_PER_UPDATE, Rows, mini_batches_of
from support.toy import VOCABULARY, ToyFolder, build_policy
from support.worlds import Worlds

from tepo_nemo.config.schema import Config
from tepo_nemo.training.batch import MicroBatch, TrainBatch


def apart(attention: Callable) -> Callable:
    """Megatron-core's attention on one sequence after the other."""

    def forward(self, query, key, value, attention_mask, *, packed_seq_params=None, **options):
        if packed_seq_params is None:
            return attention(self, query, key, value, attention_mask, **options)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        assert max(lengths) == packed_seq_params.max_seqlen_q and sum(lengths) == len(query)
        parts = zip(*(each.split(lengths) for each in (query, key, value)), strict=True)
        return torch.cat(
            [attention(self, *(each[:, None] for each in part), None, **options)[:, 0] for part in parts]
        )

    return forward


def losses_and_gradients(
    rank: int, world_size: int, config: Config, batch: TrainBatch, old: Rows
) -> dict[bool, tuple[float, dict, list]]:
    """Of the first mini-batch, packed and not: its loss, this rank's gradients, statistics of the second."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from tepo_nemo.objectives.contract import Mean

    host, policy = build_policy(config)
    policy.prepare_for_training()
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DotProductAttention, "forward", apart(DotProductAttention.forward))
        first, second, _ = mini_batches_of(
            policy, batch, old, responses_per_update=RESPONSES_PER_UPDATE, micro_batch_size=4
        )
        for packed in (False, True):
            host.actor.sequence_packing = packed
            (statistics,) = policy.get_token_statistics([second])
            policy.prepare_for_training_step()
            loss, _ = policy.get_loss_and_metrics(first, forward_only=False)
            policy.finish_training_step()
            share = (
                {} if loss is None else {"loss": Mean(loss, loss.new_full((), 1 / policy.data_parallel_size))}
            )
            values = [torch.stack(tuple(of_micro)) for of_micro in statistics]
            found[packed] = policy.reduce_metrics(share)["loss"], own_gradients(host), values
    return found


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ({}, []),
        ({"tensor": 2}, ["model.sequence_parallel=true"]),
        ({"pipeline": 2}, []),
        ({"data": 2}, []),
    ],
    ids=["tp1", "tp2_sp", "pp2", "dp2"],
)
def test_packed_is_padded(
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
    layout: dict[str, int],
    overrides: list[str],
) -> None:
    start = given(False)
    config = toy.config(*start.overrides, *overrides, **layout)
    ranks = worlds(2 if layout else 1, stack="nemo").run(losses_and_gradients, config, start.batch, start.old)
    for found in ranks:
        assert found[True][0] == pytest.approx(found[False][0], rel=1e-5)
        for packed, padded in zip(found[True][2], found[False][2], strict=True):
            torch.testing.assert_close(packed, padded, rtol=1e-5, atol=2e-6)
    packed, padded = (
        whole([found[how][1] for found in ranks], vocabulary=VOCABULARY, tied=False) for how in (True, False)
    )
    assert_close(packed, padded, 1e-5, "tepo")


def test_inputs_by_hand(worlds: Worlds) -> None:
    assert worlds(1, stack="nemo").run(inputs_of_two_sequences) == [
        {
            "input_ids": [[1, 2, 3, 5, 6, 0]],
            "position_ids": [[0, 1, 2, 0, 1, 0]],
            "ends": [0, 3, 5, 6],
            "longest": 3,
            "places": [1, 2, 4],
        }
    ]


def inputs_of_two_sequences(rank: int, world_size: int) -> dict:
    """1 2 | 3 4 and 5 6 | 7: three and two positions, filled up to six."""
    from tepo_nemo.nemo.model_inputs import packed_inputs

    mask = torch.tensor([[False, True, True], [False, True, False]])
    micro = MicroBatch(
        inputs=torch.tensor([[1, 2, 3], [5, 6, 0]]),
        targets=torch.tensor([[2, 3, 4], [6, 7, 0]]),
        mask=mask,
        lengths=torch.tensor([3, 2]),
        positions=mask.flatten().nonzero().squeeze(1),
        advantages=torch.zeros(2, 3),
        group_tokens=torch.ones(2),
        rows=torch.arange(2),
    )
    inputs = packed_inputs(micro, torch.device("cpu"), length_multiple=2)
    return {
        "input_ids": inputs.input_ids.tolist(),
        "position_ids": inputs.position_ids.tolist(),
        "ends": inputs.packed_seq_params.cu_seqlens_q.tolist(),
        "longest": inputs.packed_seq_params.max_seqlen_q,
        "places": inputs.places.tolist(),
    }
