"""A run that starts from a converted model: its checkpoints, as folders and as a file, go back."""

from pathlib import Path

import pytest
import torch
from support.converted import FROM_THE_CHECKPOINT, Silent
from support.gather import EMBEDDING, whole
from support.huggingface_models import VOCABULARY, all_weights
from support.resume_runs import resume_config, run_here
from support.toy import make_toy_folder
from support.worlds import Worlds
from torch import Tensor

from tepo_nemo import cli
from tepo_nemo.conversion.convert import convert
from tepo_nemo.errors import UserError

pytestmark = pytest.mark.timeout(300)


class Run:
    """A run directory, and the weights that the run ended with."""

    def __init__(self, path: Path, weights: dict[str, Tensor]) -> None:
        self.path, self.weights = path, weights


@pytest.fixture(scope="module")
def run(worlds: Worlds, models: dict, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One step of TEPO on two tensor-parallel ranks."""
    (toy,) = worlds(1, stack="nemo").run(make_toy_folder, tmp_path_factory.mktemp("toy"))
    output = tmp_path_factory.mktemp("runs") / "run"
    config = resume_config(
        toy,
        output,
        *(f"model.{key}=null" for key in FROM_THE_CHECKPOINT),
        f"model.vocab_size={VOCABULARY}",
        f"model.restore_from_path={models['qwen2_5'].nemo}",
        "trainer.max_steps=1",
        "trainer.warmup_steps=0",
        tensor=2,
    )
    ended = worlds(2, stack="nemo").run(run_here, config, timeout=110)
    return Run(output, whole([rank.weights for rank in ended], vocabulary=VOCABULARY, tied=False))


def test_the_last_checkpoint_of_a_run(run: Run, models: dict, tmp_path: Path) -> None:
    assert cli.main(["convert", str(run.path), str(tmp_path / "back")]) == 0
    before, after = all_weights(models["qwen2_5"].huggingface), all_weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert torch.equal(after["model.embed_tokens.weight"], run.weights[EMBEDDING])
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert torch.equal(after["model.norm.weight"], run.weights["decoder.final_layernorm.weight"])


def test_a_checkpoint_folder_is_the_file(run: Run, tmp_path: Path) -> None:
    """Though it holds an optimizer, too."""
    folder, file = (run.path / "checkpoints" / name for name in ("step_000001", "step_000001.nemo"))
    assert (folder / "optimizer").is_dir()
    convert(folder, tmp_path / "of_folder", watcher=Silent())
    convert(file, tmp_path / "of_file", watcher=Silent())
    one, other = all_weights(tmp_path / "of_folder"), all_weights(tmp_path / "of_file")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_changed_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    """By the manifest that the run has written."""
    folder = run.path / "checkpoints" / "step_000001"
    config = folder / "model_config.yaml"
    text = config.read_text()
    config.write_text(text + "\n")
    try:
        with pytest.raises(UserError, match=r"model_config\.yaml has sha256 .* and its manifest\.json says"):
            convert(folder, tmp_path / "back", watcher=Silent())
    finally:
        config.write_text(text)
