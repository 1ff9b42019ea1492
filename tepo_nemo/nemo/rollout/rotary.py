"""Rotary embedding before the cache instead of after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.transformer.attention import SelfAttention
from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel
from torch import Tensor


@contextmanager
def cache_rotated_keys(model: MegatronGPTModel) -> Iterator[None]:
    """Let the cache hold keys as attention takes them.

    Megatron-core caches keys without their positions and rotates all of them at every step: the dearest part
    of a step, and more of it the longer the response. A key's rotation depends on its own position alone, so
    that it can be done once, to the same bits.
    """
    attentions = [
        module
        for chunk in model.get_model_module_list()
        for module in chunk.modules()
        if isinstance(module, SelfAttention)
    ]
    for attention in attentions:
        store = attention._adjust_key_value_for_inference
        attention._adjust_key_value_for_inference = partial(_rotate_and_store, attention, store)
    try:
        yield
    finally:
        for attention in attentions:
            del attention._adjust_key_value_for_inference  # the method of the class shows again


def _rotate_and_store(
    attention: SelfAttention,
    store,
    inference_params,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary_pos_emb: tuple[Tensor, Tensor] | None,
    *rest,
):
    """In place of `Attention._adjust_key_value_for_inference`; leaves it nothing to rotate afterwards."""
    if rotary_pos_emb is not None:
        first = inference_params.sequence_len_offset
        of_query, of_key = (angles[first : first + len(key)] for angles in rotary_pos_emb)
        query = apply_rotary_pos_emb(query, of_query, config=attention.config)
        key = apply_rotary_pos_emb(key, of_key, config=attention.config)
    return store(inference_params, query, key, value, None, *rest)
