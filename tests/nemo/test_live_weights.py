"""Weights of running ranks on their way to Hugging Face: the same, wherever they lie."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.converted import Silent
from support.huggingface_models import all_weights
from support.layouts import LAYOUTS, Given
from support.toy import ToyFolder, build_policy
from support.worlds import Worlds
from torch import Tensor

from tepo_nemo.config.schema import Config
from tepo_nemo.conversion.convert import convert

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it


def read_all(rank: int, world_size: int, config: Config) -> dict[str, Tensor]:
    """Every weight by its name on Hugging Face, as this rank gets it."""
    from tepo_nemo.conversion.families import Architecture
    from tepo_nemo.conversion.to_huggingface import huggingface_weights
    from tepo_nemo.nemo.live_weights import LiveWeights

    host, _ = build_policy(config)
    architecture = Architecture.of(host.actor.huggingface_files["config.json"], "config.json")
    return dict(huggingface_weights(LiveWeights(host.actor), architecture))


@pytest.mark.parametrize(
    ("layout", "tied"), [("tp2", False), ("pp2", True), ("dp2", False), ("tp2_pp2", False)]
)
def test_every_layout_hands_over_what_its_checkpoint_converts_to(
    worlds: Worlds, toy: ToyFolder, given: Callable[[bool], Given], tmp_path: Path, layout: str, tied: bool
) -> None:
    """To the bit: NeMo's own file, read by `tepo-nemo convert`, against the ranks' memory."""
    start = given(tied)
    convert(start.path, tmp_path / "converted", watcher=Silent())
    expected = all_weights(tmp_path / "converted")
    config = LAYOUTS[layout].config(toy, *start.overrides, "trainer.optimizer.name=distributed_adam")
    main, *others = worlds(LAYOUTS[layout].ranks, stack="nemo").run(read_all, config, timeout=110)
    assert main.keys() == expected.keys() and ("lm_head.weight" in expected) != tied
    for name, value in expected.items():
        assert torch.equal(main[name], value), name
    assert all(value.is_meta for other in others for value in other.values())
