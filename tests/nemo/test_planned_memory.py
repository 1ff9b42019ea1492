"""Weights, gradients and optimizer state of the plan against the tensors of real hosts."""

from collections.abc import Callable

import pytest
from support.layouts import LAYOUTS, MODES, Given
from support.memory import count_numbers, measure_bytes
from support.toy import ToyFolder
from support.worlds import Worlds

from tepo_nemo.planning.architecture import Architecture
from tepo_nemo.planning.memory import key_value_bytes
from tepo_nemo.planning.plan import make_plan
from tepo_nemo.rollout.protocol import GenerationRequest

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

# In fp32 with each optimizer, autocast, production mode. A tied embedding lies on both ends of a pipeline.
CASES = {
    "tp1": (["sgd", "adam", "autocast"], False),
    "dp2": (["distributed_adam", "production"], False),
    "tp2": (["adam", "production"], False),
    "pp2": (["adam", "production"], True),
}


@pytest.mark.parametrize("layout", CASES)
def test_bytes_of_a_rank(worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given], layout: str) -> None:
    """Within 2 %: Megatron pads its buffers."""
    modes, tied = CASES[layout]
    start = given(tied)
    configs = [LAYOUTS[layout].config(toy, *start.overrides, *MODES[mode]) for mode in modes]
    world = worlds(LAYOUTS[layout].ranks, stack="nemo")
    of_ranks = world.run(measure_bytes, configs, start.batch, start.old, timeout=110)
    for rank, of_rank in enumerate(of_ranks):
        for mode, config, measured in zip(modes, configs, of_rank, strict=True):
            stages = make_plan(config).stages
            planned = stages[rank if len(stages) > 1 else 0]
            for part, size in measured.items():
                assert getattr(planned, part) == pytest.approx(size, rel=0.02), (rank, mode, part)


SHAPES = {
    "as it is": [],
    "tied": ["model.share_embeddings_and_output_weights=true"],
    "Qwen2.5": ["model.qkv_bias=true", "model.kv_channels=24"],
    "Qwen3": ["model.qk_layernorm=true", "model.kv_channels=24"],
    "GPT-2": [
        "model.normalization=layernorm", "model.bias=true", "model.activation=gelu",
        "model.num_query_groups=4", "model.position_embedding_type=learned_absolute",
    ],
}  # fmt: skip
REQUEST = GenerationRequest(
    prompt_tokens=[[5, 6], [7, 8], [9, 10]],
    prompt_keys=[1, 2, 3],
    sample_indices=[0, 0, 0],
    seed=1,
    temperature=1.0,
    max_response_lengths=[5, 5, 5],
)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_parameters_and_cache_of_a_rank(worlds: Worlds, toy: ToyFolder, layout: str) -> None:
    """To the last one. Three sequences of two and five tokens, of which the last is never fed."""
    configs = [LAYOUTS[layout].config(toy, *overrides) for overrides in SHAPES.values()]
    of_ranks = worlds(2, stack="nemo").run(count_numbers, configs, REQUEST, timeout=110)
    for rank, of_rank in enumerate(of_ranks):
        for name, config, (parameters, cached) in zip(SHAPES, configs, of_rank, strict=True):
            shape = Architecture.of(config.model)
            stage = rank if layout == "pp2" else 0
            assert shape.parameters_of_rank(stage) == parameters, name
            assert 3 * 6 * key_value_bytes(config, shape) == cached, name


def test_the_vocabulary_is_the_configured_one(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given]
) -> None:
    """200 rows, where the tokenizer has 17 entries; by the tokenizer, weights would be a quarter less."""
    start = given(False)
    config = LAYOUTS["tp2"].config(toy, "model.vocab_size=200")
    for (measured,) in worlds(2, stack="nemo").run(
        measure_bytes, [config], start.batch, start.old, timeout=110
    ):
        assert measured["weights"] == make_plan(config).stages[0].weights
