"""What enters the output layer: response tokens alone, in the old-statistics pass and in training."""

from collections.abc import Callable

import pytest
import torch
from support.layouts import Given
from support.synthetic import RESPONSES_PER_UPDATE
from support.toy import ToyFolder, build_policy
from support.updates import mini_batches_of
from support.worlds import Worlds

from tepo_nemo.config.schema import Config
from tepo_nemo.training.batch import TrainBatch


def rows_of_the_product(
    rank: int, world_size: int, config: Config, batch: TrainBatch
) -> dict[str, list[list[int]]]:
    """For each pass the shape of the hidden states that reach the product, a micro-batch at a time."""
    from tepo_nemo.nemo import output_layer
    from tepo_nemo.training.statistics import with_old_statistics

    host, policy = build_policy(config)
    policy.prepare_for_training()
    mini_batches = mini_batches_of(
        policy, batch, None, responses_per_update=RESPONSES_PER_UPDATE, micro_batch_size=4
    )[:2]
    seen: list[list[int]] = []
    name = "fused_logprob_entropy" if config.trainer.fused_output_layer else "vocab_parallel_logprob_entropy"
    operator = getattr(output_layer, name)

    def watched(first: torch.Tensor, *arguments, **options):
        seen.append(list(first.shape))
        return operator(first, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_layer, name, watched)
        for chunk in host.actor.get_model_module_list():
            if chunk.post_process:
                patch.setattr(chunk.output_layer, "forward", None)  # logits of all positions
        mini_batches = with_old_statistics(policy, mini_batches, first_too=False)
        old, seen[:] = list(seen), []
        policy.prepare_for_training_step()
        policy.get_loss_and_metrics(mini_batches[0], forward_only=False)
        policy.finish_training_step()
    return {"old": old, "training": seen}


@pytest.mark.parametrize(
    ("layout", "fused"),
    [({}, True), ({"tensor": 2}, True), ({"tensor": 2}, False), ({"pipeline": 2}, True)],
    ids=["tp1", "tp2", "tp2 plain", "pp2"],
)
def test_only_response_tokens(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given], layout: dict[str, int], fused: bool
) -> None:
    start = given(False)
    overrides = [*start.overrides, f"trainer.fused_output_layer={str(fused).lower()}"]
    if layout.get("tensor") == 2:
        overrides.append("model.sequence_parallel=true")
    config = toy.config(*overrides, **layout)
    ranks = worlds(2 if layout else 1, stack="nemo").run(rows_of_the_product, config, start.batch)
    # The first mini-batch is trained on, the second one's old statistics are taken; in both, the rows are the
    # tokens of the responses, and the columns hidden states or logits.
    width = config.model.hidden_size if fused else 16
    training, old = start.batch.response_lengths[: 2 * RESPONSES_PER_UPDATE].view(2, -1).sum(1).tolist()
    for rank, found in enumerate(ranks):
        if layout.get("pipeline", 1) == 1 or rank == 1:
            assert sum(rows for rows, _ in found["training"]) == training
            assert sum(rows for rows, _ in found["old"]) == old
            assert {columns for shapes in found.values() for _, columns in shapes} == {width}
        else:
            assert found == {"old": [], "training": []}
