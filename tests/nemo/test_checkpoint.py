"""What one layout saves, every layout loads; a save that was interrupted leaves nothing behind."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.gather import whole
from support.layouts import LAYOUTS, OPTIMIZERS, Given
from support.saving import load, update_and_save
from support.toy import VOCABULARY, ToyFolder
from support.worlds import Worlds
from torch import Tensor

from tepo_nemo.rollout.protocol import GenerationRequest

GREEDY = GenerationRequest(
    prompt_tokens=[[5, 14, 6, 16], [9], [4, 8, 15, 5, 7, 16]],
    prompt_keys=[1, 2, 3],
    sample_indices=[0, 0, 0],
    seed=1,
    temperature=0.0,
    max_response_length=10,
)
SAVED = {"untied": (False, "sgd"), "tied": (True, "sgd"), "production": (False, "production")}


@pytest.fixture(scope="module", params=SAVED)
def saved(
    request: pytest.FixtureRequest,
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, bool, dict[str, Tensor], list[list[int]]]:
    """A file saved at TP2 after an update, whether its embedding is tied, its weights, and its greedy tokens."""
    tied, mode = SAVED[request.param]
    start, path = given(tied), tmp_path_factory.mktemp("checkpoint") / "step.nemo"
    config = LAYOUTS["tp2"].config(toy, *start.overrides, *OPTIMIZERS[mode])
    answers = worlds(2, stack="nemo").run(update_and_save, config, path, start.batch, start.old, GREEDY, timeout=110)
    weights = whole([weights for weights, _ in answers], vocabulary=VOCABULARY, tied=tied)
    assert any(not torch.equal(weights[name], value) for name, value in start.weights.items())
    return path, tied, weights, answers[0][1].tokens.tolist()


def test_a_save_leaves_the_file_alone(saved: tuple) -> None:
    """No part of it beside it, and nothing of the interrupted one before it."""
    path = saved[0]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("layout", ["tp1", "pp2"])
def test_other_layouts_load_the_same_weights(saved: tuple, worlds: Worlds, toy: ToyFolder, layout: str) -> None:
    """To the bit, though the vocabulary is padded to another size; what bf16 saved is loaded in fp32."""
    path, tied, weights, tokens = saved
    config = LAYOUTS[layout].config(
        toy,
        f"model.restore_from_path={path}",
        f"model.share_embeddings_and_output_weights={str(tied).lower()}",
    )
    answers = worlds(LAYOUTS[layout].ranks, stack="nemo").run(load, config, GREEDY, timeout=110)
    loaded = whole([part for part, _ in answers], vocabulary=VOCABULARY, tied=tied)
    assert loaded.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(loaded[name], value), name
    for _, generation in answers:
        assert generation.tokens.tolist() == tokens
