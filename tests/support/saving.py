"""Saving and loading `.nemo` files. Run in all ranks of a layout."""

import multiprocessing
from pathlib import Path
from unittest.mock import patch

from support.gather import Part, own_weights
from support.synthetic import RESPONSES_PER_UPDATE, Rows, mini_batches_of
from support.toy import build_policy

from tepo_nemo.config.schema import Config
from tepo_nemo.rollout.protocol import Generation, GenerationRequest
from tepo_nemo.training.batch import TrainBatch


def update_and_save(
    rank: int,
    world_size: int,
    config: Config,
    path: Path,
    batch: TrainBatch,
    old: Rows,
    request: GenerationRequest,
) -> tuple[Part, Generation]:
    """Move the weights, fail to save them, then save them; the weights and what they generate."""
    from tepo_nemo.nemo.agreement import RankError
    from tepo_nemo.nemo.sharded import ShardedSave

    host, policy = build_policy(config)
    policy.prepare_for_training()
    mini_batches = mini_batches_of(
        policy, batch, old, responses_per_update=RESPONSES_PER_UPDATE, micro_batch_size=4
    )
    policy.prepare_for_training_step()
    policy.get_loss_and_metrics(mini_batches[0], forward_only=False)
    policy.finish_training_step()
    assert not policy.clip_gradient(None, {}).not_finite
    policy.optimizer_step(config.trainer.optimizer.learning_rate)

    def half_way(save: ShardedSave) -> None:
        (path.parent / f".{path.name}.partial" / "model_weights" / f"half_{rank}").touch()
        raise OSError(28, "No space left on device")

    with patch.object(ShardedSave, "write", half_way):
        try:
            policy.save(path)
        except RankError as failure:
            assert "No space left on device" in str(failure)
            left = list(path.parent.iterdir())
            assert rank > 0 or not left, f"nothing of it may be left, a full disk least of all: {left}"
        else:
            raise AssertionError("the save was interrupted and did not say so")
    policy.save(path)
    assert not multiprocessing.active_children(), "a rank may end without clean-up, and they would stay"
    return own_weights(host), _generate(policy, request)


def load(rank: int, world_size: int, config: Config, request: GenerationRequest) -> tuple[Part, Generation]:
    """The weights of a checkpoint and what they generate."""
    host, policy = build_policy(config)
    return own_weights(host), _generate(policy, request)


def _generate(policy, request: GenerationRequest) -> Generation:
    policy.prepare_for_inference()
    generation = policy.infer(request)
    policy.finish_inference()
    return generation
