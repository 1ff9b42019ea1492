"""What one layout saves, every layout loads; a save that was interrupted leaves nothing behind."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.gather import whole
from support.layouts import BF16, LAYOUTS, MODES, Given
from support.saving import load, update_and_save
from support.toy import VOCABULARY, ToyFolder
from support.worlds import Worlds
from torch import Tensor

from tepo_nemo.rollout.protocol import Generation, GenerationRequest

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

GREEDY = GenerationRequest(
    prompt_tokens=[[5, 14, 6, 16], [9], [4, 8, 15, 5, 7, 16]],
    prompt_keys=[1, 2, 3],
    sample_indices=[0, 0, 0],
    seed=1,
    temperature=0.0,
    max_response_lengths=[10, 10, 10],
)


class Saved(NamedTuple):
    """A file that TP2 saved after an update, and what was in the model then."""

    path: Path
    mode: str
    tied: bool
    weights: dict[str, Tensor]
    greedy: Generation


SAVED = {"untied": (False, "sgd"), "tied": (True, "sgd"), "production": (False, "production")}


@pytest.fixture(scope="module", params=SAVED)
def saved(
    request: pytest.FixtureRequest,
    worlds: Worlds,
    toy: ToyFolder,
    given: Callable[[bool], Given],
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    tied, mode = SAVED[request.param]
    start, path = given(tied), tmp_path_factory.mktemp("checkpoint") / "step.nemo"
    config = LAYOUTS["tp2"].config(toy, *start.overrides, *MODES[mode])
    answers = worlds(2, stack="nemo").run(
        update_and_save, config, path, start.batch, start.old, GREEDY, timeout=110
    )
    weights = whole([part for part, _ in answers], vocabulary=VOCABULARY, tied=tied)
    assert any(not torch.equal(weights[name], value) for name, value in start.weights.items())
    return Saved(path, mode, tied, weights, answers[0][1])


def test_a_save_leaves_the_file_alone(saved: Saved) -> None:
    """No part of it beside it, and nothing of the interrupted one before it."""
    assert [entry.name for entry in saved.path.parent.iterdir()] == [saved.path.name]


@pytest.mark.parametrize("layout", ["tp1", "pp2"])
def test_other_layouts_load_the_same_weights(
    saved: Saved, worlds: Worlds, toy: ToyFolder, layout: str
) -> None:
    """To the bit, though the vocabulary is padded to another size; what bf16 saved is loaded in fp32."""
    config = LAYOUTS[layout].config(
        toy,
        f"model.restore_from_path={saved.path}",
        f"model.share_embeddings_and_output_weights={str(saved.tied).lower()}",
    )
    answers = worlds(LAYOUTS[layout].ranks, stack="nemo").run(load, config, GREEDY, timeout=110)
    loaded = whole([part for part, _ in answers], vocabulary=VOCABULARY, tied=saved.tied)
    assert loaded.keys() == saved.weights.keys()
    for name, value in saved.weights.items():
        assert torch.equal(loaded[name], value), name
    if saved.mode not in BF16:  # else the tokens are bf16's
        for _, generation in answers:
            assert generation.tokens.tolist() == saved.greedy.tokens.tolist()
