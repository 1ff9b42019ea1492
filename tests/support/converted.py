"""What the host makes of converted checkpoints. Run in all ranks of a layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from support.gather import Part, own_weights
from support.huggingface_models import VOCABULARY
from support.toy import build_policy
from support.updates import Case, take_case
from torch import Tensor

from tepo_nemo.config.load import load_config
from tepo_nemo.config.schema import Config
from tepo_nemo.rollout.protocol import GenerationRequest
from tepo_nemo.training.batch import TrainBatch

FROM_THE_CHECKPOINT = (
    "tokenizer", "make_vocab_size_divisible_by", "encoder_seq_length", "num_layers", "hidden_size",
    "ffn_hidden_size", "num_attention_heads", "num_query_groups", "normalization", "activation", "bias",
    "position_embedding_type", "share_embeddings_and_output_weights",
)  # fmt: skip


class Silent:
    """A watcher of conversions that says nothing."""

    def begin(self, stage: str, size: int) -> None: ...

    def advance(self, count: int) -> None: ...


def host_of(checkpoint: Path, train: Path, *overrides: str, tensor: int = 1, pipeline: int = 1) -> Config:
    """A configuration that leaves the whole architecture to the checkpoint."""
    return load_config(
        [
            *(f"model.{key}=null" for key in FROM_THE_CHECKPOINT),
            "model.name=converted",
            f"model.vocab_size={VOCABULARY}",
            f"model.restore_from_path={checkpoint}",
            f"model.tensor_model_parallel_size={tensor}",
            f"model.pipeline_model_parallel_size={pipeline}",
            f"hardware.devices_per_node={tensor * pipeline}",
            f"data.train={train}",
            "data.evaluation=[]",
            "rollout.max_response_length=12",
            *overrides,
        ]
    )


@dataclass(frozen=True)
class Answer:
    """One rank's."""

    logits: Tensor | None  # [rows, length, V_local], on the last stage
    responses: list[list[int]]


def answer_all(
    rank: int, world_size: int, configs: Mapping[str, Config], tokens: Tensor, request: GenerationRequest
) -> dict[str, Answer]:
    """Logits of `tokens` [rows, length] and responses to the request, of every checkpoint."""
    answers = {}
    for name, config in configs.items():
        host, policy = build_policy(config)
        policy.prepare_for_inference()
        generation = policy.infer(request)
        responses = [row[:n].tolist() for row, n in zip(generation.tokens, generation.lengths, strict=True)]
        answers[name] = Answer(_logits(host.actor, tokens), responses)
        policy.finish_inference()
    return answers


@torch.no_grad()
def _logits(actor, tokens: Tensor) -> Tensor | None:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    rows, length = tokens.shape

    def forward_step(data_iterator, model):
        positions = torch.arange(length).expand(rows, -1)
        output = model(input_ids=tokens, position_ids=positions, attention_mask=None)
        return output, lambda output, non_loss_data: output

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([None]),
        model=actor.model,
        num_microbatches=1,
        forward_only=True,
        seq_length=length,
        micro_batch_size=rows,
        collect_non_loss_data=True,
    )
    return outputs[0] if outputs else None


def names_of(rank: int, world_size: int, config: Config) -> dict[str, tuple[int, ...] | None]:
    """What Megatron-core itself would save of the model: shape of every tensor, None for an object."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    host, _ = build_policy(config)
    state = host.actor.sharded_state_dict()
    apply_factories(state)
    return {
        part.key if isinstance(part, ShardedTensor) else part.unique_key: (
            tuple(part.global_shape) if isinstance(part, ShardedTensor) else None
        )
        for part in nested_values(state)
    }


def load_objects(rank: int, world_size: int, config: Config, folder: Path, keys: list[str]) -> list[object]:
    """What Megatron-core reads under keys of sharded objects."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    build_policy(config)  # for its process groups
    asked = {key: ShardedObject.empty_from_unique_key(key) for key in keys}
    return list(dist_checkpointing.load(asked, str(folder)).values())


@dataclass(frozen=True)
class Trained:
    """One rank's, of a model that was changed and saved."""

    logits: Tensor | None
    part: Part


def change_and_save(
    rank: int, world_size: int, config: Config, tokens: Tensor, path: Path, factor: float
) -> Trained:
    """Multiply every weight, and save them."""
    host, policy = build_policy(config)
    with torch.no_grad():
        for parameter in host.actor.parameters():
            parameter.mul_(factor)
    policy.save(path)
    policy.prepare_for_inference()
    return Trained(_logits(host.actor, tokens), own_weights(host))


def gradients_of(rank: int, world_size: int, config: Config, batch: TrainBatch) -> Part:
    """Of the configured loss, over the whole batch as one mini-batch."""
    host, policy = build_policy(config)
    case = Case(batch, None, config.algorithm, responses_per_update=len(batch))
    policy.prepare_for_training()
    return take_case(host, policy, case).gradients
