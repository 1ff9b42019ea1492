"""The ranks of one copy of the model: those that share an engine, and those that have one each."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tepo_nemo.parallel.data import gather_ragged_rows
from tepo_nemo.parallel.gather import gather_stacked
from tepo_nemo.rollout.protocol import Generation, GenerationRequest, RolloutError


def own_rows(request: GenerationRequest) -> GenerationRequest:
    """The rows that this pipeline stage answers with its engine."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    bounds = [len(request) * part // stages for part in range(stages + 1)]
    return request.rows(bounds[stage], bounds[stage + 1])


def check_agreement(generation: Generation) -> None:
    """The ranks that share an engine have drawn the same: its cache would hold a mixture otherwise.

    Raises:
        RolloutError: on each of them.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return
    drawn = torch.cat([generation.tokens.flatten(), generation.lengths])
    of_ranks = gather_stacked(drawn.to(torch.cuda.current_device()), group)
    if bool((of_ranks != of_ranks[0]).any()):
        raise RolloutError(
            "the tensor-parallel ranks of a TensorRT-LLM engine have drawn different tokens: their seeds or "
            "their weights differ"
        )


def gather_rows(own: Generation, width: int) -> Generation:
    """The responses of all pipeline stages, in the order of the request; on every rank.

    Args:
        own: of this stage, which may have had no rows.
        width: the columns of all stages' tokens.
    """
    group = parallel_state.get_pipeline_model_parallel_group()

    def whole(rows: Tensor) -> Tensor:
        return gather_ragged_rows(rows, group)

    def widen(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))

    lengths = whole(own.lengths)
    longest = max(1, int(lengths.max()))
    return Generation(
        tokens=whole(widen(own.tokens))[:, :longest],
        lengths=lengths,
        finished=whole(own.finished.to(torch.uint8)).bool(),
        logprobs=whole(widen(own.logprobs))[:, :longest],
    )
