"""One forward pass of generation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.inference_params import InferenceParams
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from torch import Tensor


def last_logits(model: MegatronGPTModel, tokens: Tensor, cache: InferenceParams) -> Tensor | None:
    """Logits [rows, V_local] after the last of `tokens` [rows, length]; None on stages without them.

    Args:
        cache: says where in it the tokens stand, and remembers their keys and values.
    """
    rows, length = tokens.shape
    first = cache.sequence_len_offset
    position_ids = torch.arange(first, first + length, device=tokens.device).expand(rows, -1)

    def forward_step(data_iterator, model):
        output = model(
            input_ids=tokens, position_ids=position_ids, attention_mask=None, inference_params=cache
        )
        return output, lambda output, non_loss_data: output[:, -1]

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([None]),
        model=model.model,
        num_microbatches=1,
        forward_only=True,
        seq_length=length,
        micro_batch_size=rows,
        collect_non_loss_data=True,
    )
    return outputs[0] if outputs else None


@contextmanager
def last_position_logits(model: MegatronGPTModel) -> Iterator[None]:
    """Let only the last position enter the output layer; a prompt's other logits are never looked at."""

    def keep_last(module, args):
        hidden, *rest = args
        return (hidden[-1:], *rest)

    hooks = [
        chunk.output_layer.register_forward_pre_hook(keep_last)
        for chunk in model.get_model_module_list()
        if hasattr(chunk, "output_layer")
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
