"""Parameter counts against the published ones, and against `transformers` on the meta device."""

import pytest
import torch
import transformers
from support.published_models import PARAMETERS, PUBLISHED

from tepo_nemo.config.load import load_config
from tepo_nemo.planning.architecture import Architecture

MODELS = list(PUBLISHED)


def architecture(name: str, *overrides: str) -> Architecture:
    config = load_config([f"model={name}", "hardware=h100x32", "data=math", *overrides], files=False)
    return Architecture.of(config.model)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name):
    assert architecture(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("qwen3")])
def test_parameters_are_those_that_transformers_makes(name):
    config = transformers.AutoConfig.for_model(**PUBLISHED[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert architecture(name).parameters == sum(each.numel() for each in model.parameters())


def test_qwen3_by_hand():
    """The pinned transformers does not have it. Cross-checked with transformers 4.57 on the meta device.

    40 layers: four projections of attention, 40 query and 8 key-value heads of 128 channels, without biases;
    a norm of each head's queries and keys; a gated feed-forward layer; two norms. Ends: two tables, one norm.
    """
    h, q, kv, f, v = 5120, 40 * 128, 8 * 128, 17408, 151936
    layer = h * q + 2 * h * kv + q * h + 2 * 128 + 3 * h * f + 2 * h
    assert architecture("qwen3_14b").parameters == 40 * layer + 2 * v * h + h


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 2), (2, 4), (1, 4)])
def test_ranks_hold_the_model_once_but_for_what_is_repeated(name, tensor, pipeline):
    shape = architecture(
        name,
        f"model.tensor_model_parallel_size={tensor}",
        f"model.pipeline_model_parallel_size={pipeline}",
        f"model.sequence_parallel={str(tensor > 1).lower()}",
    )
    held = tensor * sum(shape.parameters_of_rank(stage) for stage in range(pipeline))
    norms = (2 * shape.layers + 1) * shape.hidden + shape.layers * shape.qk_layernorm * 2 * 128
    padding = 2 * (shape.padded_vocabulary - shape.vocabulary) * shape.hidden
    assert held == shape.parameters + (tensor - 1) * norms + padding
    assert padding < 2 * 128 * tensor * shape.hidden
