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


def response_logprobs_and_entropy(
    model: GPTModel,
    hidden: Tensor,
    places: Tensor,
    target: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    fused: bool,
    entropy_requires_grad: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each trained token and entropy of its distribution, [n] fp32 each.

    Positions of prompts and padding never enter the output layer.

    Args:
        model: the last pipeline stage.
        hidden: [length, rows, H] after the final norm; under sequence parallelism this rank's part of length.
        places: [n], of the trained tokens among the flat hidden states of all ranks.
        target: [n] int64.
        fused: whether logits are made block by block and again in the backward, or once and kept for it.
        dtype: of the matrix product: that of the model's other ones. Hidden states come in fp32 from weights
            of half precision (Megatron casts what a model puts out); weights are fp32 under autocast.
    """
    # The one reduction of the hidden gradient over the tensor-parallel ranks is in the backward of these.
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    hidden = hidden.flatten(0, 1).index_select(0, places).to(dtype)
    weight = model.output_layer.weight
    if weight is None:  # tied, and the embedding is on this stage too
        weight = model.embedding.word_embeddings.weight
    weight = weight.to(dtype)
    options = dict(
        temperature=temperature, vocab_size=vocab_size, entropy_requires_grad=entropy_requires_grad
    )
    group = parallel_state.get_tensor_model_parallel_group()
    if fused:
        return fused_logprob_entropy(hidden, weight, target, group, **options)
    logits = torch.nn.functional.linear(hidden, weight)
    return vocab_parallel_logprob_entropy(logits, target, group, overwrite_logits=True, **options)
