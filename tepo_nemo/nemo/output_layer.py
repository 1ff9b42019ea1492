"""The output layer as updates need it: log-prob and entropy instead of logits, of response tokens alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from torch import Tensor

from tepo_nemo.parallel.output_layer import fused_logprob_entropy
from tepo_nemo.parallel.vocab import vocab_parallel_logprob_entropy


@contextmanager
def hidden_states_as_output(model: MegatronGPTModel) -> Iterator[None]:
    """Let the forward of the last pipeline stage end after the final norm, as that of other stages does."""
    last = [chunk for chunk in model.get_model_module_list() if chunk.post_process]
    for chunk in last:
        chunk.post_process = False
    try:
        yield
    finally:
        for chunk in last:
            chunk.post_process = True


def response_positions(mask: Tensor) -> Tensor:
    """Where the mask [S, L] is True, as positions in a flat [L, S], the order of Megatron's hidden states."""
    return mask.t().flatten().nonzero().squeeze(1)


def response_logprobs_and_entropy(
    model: GPTModel,
    hidden: Tensor,
    targets: Tensor,
    positions: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    fused: bool,
    entropy_requires_grad: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each response token and entropy of its distribution, [S, L] fp32 each; 0 elsewhere.

    Positions of prompts and padding never enter the output layer.

    Args:
        model: the last pipeline stage.
        hidden: [L, S, H] after the final norm; under sequence parallelism this rank's positions of it.
        targets: [S, L] int64.
        positions: of the response tokens, as `response_positions` gives them.
        fused: whether logits are made block by block and again in the backward, or once and kept for it.
        dtype: of the matrix product: that of the model's other ones. Hidden states come in fp32 from weights
            of half precision (Megatron casts what a model puts out); weights are fp32 under autocast.
    """
    # The one reduction of the hidden gradient over the tensor-parallel ranks is in the backward of these.
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    hidden = hidden.flatten(0, 1).index_select(0, positions).to(dtype)
    weight = model.output_layer.weight
    if weight is None:  # tied, and the embedding is on this stage too
        weight = model.embedding.word_embeddings.weight
    weight = weight.to(dtype)
    target = targets.t().flatten().index_select(0, positions)
    options = dict(
        temperature=temperature, vocab_size=vocab_size, entropy_requires_grad=entropy_requires_grad
    )
    group = parallel_state.get_tensor_model_parallel_group()
    if fused:
        values = fused_logprob_entropy(hidden, weight, target, group, **options)
    else:
        logits = torch.nn.functional.linear(hidden, weight)
        values = vocab_parallel_logprob_entropy(logits, target, group, overwrite_logits=True, **options)

    def spread(value: Tensor) -> Tensor:
        flat = value.new_zeros(targets.numel()).index_copy(0, positions, value)
        return flat.view(targets.t().shape).t()

    logprobs, entropy = map(spread, values)
    return logprobs, entropy
