"""Switches sequence parallelism of a built model off for generation and on again for training.

Decoding feeds one position at a time, which cannot be scattered over tensor-parallel ranks.
"""

from nemo.collections.nlp.models.language_modeling.megatron_gpt_model import MegatronGPTModel

# Modules of megatron-core keep copies of the setting under these names.
_SWITCHES = ("sequence_parallel", "reduce_scatter_embeddings")


def set_sequence_parallelism(model: MegatronGPTModel, enabled: bool) -> None:
    """Set it in the configuration and in every module that keeps a copy; nothing for a model without."""
    if not model.cfg.get("sequence_parallel", False):
        return
    model.transformer_config.sequence_parallel = enabled
    model.model_parallel_config.sequence_parallel = enabled
    for chunk in model.get_model_module_list():
        for module in chunk.modules():
            for switch in _SWITCHES:
                if hasattr(module, switch):
                    setattr(module, switch, enabled)
