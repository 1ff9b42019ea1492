"""A converted model computes what transformers computes, at every layout, and comes back to the bit."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.converted import Answer, Silent, answer_all, host_of
from support.huggingface_models import MODELS, VOCABULARY, all_weights, logits_of, make_model
from support.once import once
from support.worlds import Worlds
from torch import Tensor

from tepo_nemo import cli
from tepo_nemo.conversion import to_huggingface
from tepo_nemo.conversion.convert import convert
from tepo_nemo.rollout.protocol import GenerationRequest

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it

NAMES = (*MODELS, "qwen3")
LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}


@pytest.fixture(scope="module")
def answers(
    worlds: Worlds, models: dict, train: Path, tokens: Tensor, greedy: GenerationRequest
) -> Callable[[str], list[dict[str, Answer]]]:
    """`answers(layout)`: what each rank makes of every model; a layout works once."""

    def work(layout: str) -> list[dict[str, Answer]]:
        tensor, pipeline = LAYOUTS[layout]
        configs = {
            name: host_of(model.nemo, train, tensor=tensor, pipeline=pipeline)
            for name, model in models.items()
        }
        return worlds(tensor * pipeline, stack="nemo").run(answer_all, configs, tokens, greedy, timeout=110)

    return once(work)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_text(
    models: dict, answers: Callable[[str], list[dict[str, Answer]]], layout: str, name: str
) -> None:
    expected, ranks = models[name].expected, [answer[name] for answer in answers(layout)]
    shards = [answer.logits for answer in ranks if answer.logits is not None]
    logits = torch.cat(shards, dim=-1)[..., :VOCABULARY]
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-4)
    for answer in ranks:
        assert answer.responses == expected.greedy


@pytest.mark.parametrize("name", NAMES)
def test_comes_back_unchanged(models: dict, name: str, tmp_path: Path) -> None:
    """The weights to the bit, and every other file as it was."""
    source = models[name].huggingface
    convert(models[name].nemo, tmp_path / "back", watcher=Silent())
    before, after = all_weights(source), all_weights(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype and torch.equal(value, after[key]), key
    for file in source.glob("*"):
        if ".safetensors" not in file.name:
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    source = make_model("qwen2_5", tmp_path / "model", dtype)
    convert(source, tmp_path / "nemo", watcher=Silent())
    convert(tmp_path / "nemo", tmp_path / "back", watcher=Silent())
    before, after = all_weights(source), all_weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(after[key].dtype == dtype and torch.equal(value, after[key]) for key, value in before.items())


def test_transformers_loads_several_files(
    models: dict, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_huggingface, "FILE_BYTES", 40_000)
    convert(models["llama"].nemo, tmp_path / "back", watcher=Silent())
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 3
    assert torch.equal(logits_of(tmp_path / "back", tokens), models["llama"].expected.logits)


def test_the_manifest_has_every_file_with_its_hash(models: dict) -> None:
    folder = models["qwen2_5"].nemo
    manifest = json.loads((folder / "manifest.json").read_text())
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert sorted([*manifest["files"], "manifest.json"]) == sorted(files)
    assert (manifest["family"], manifest["source"]["name"]) == ("qwen2.5", "huggingface")
    for where, said in (
        (folder, manifest["files"]),
        (models["qwen2_5"].huggingface, manifest["source"]["files"]),
    ):
        assert said
        for name, found in said.items():
            content = (where / name).read_bytes()
            assert found == [len(content), hashlib.sha256(content).hexdigest()]


def test_of_a_run_the_last_checkpoint_is_converted(
    models: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    assert cli.main(["convert", str(run), str(tmp_path / "back")]) == 2
    assert f"SOURCE={run}: the run has saved no checkpoint" in capsys.readouterr().err
    (run / "checkpoints" / "step_000009.nemo").write_text("an earlier one")
    shutil.copy(models["mistral"].nemo, run / "checkpoints" / "step_000010.nemo")
    assert cli.main(["convert", str(run), str(tmp_path / "back")]) == 0
    weights = models["mistral"].huggingface
    assert all_weights(tmp_path / "back").keys() == all_weights(weights).keys()
    assert re.fullmatch(
        rf"{tmp_path / 'back'}  mistral, 0.00 GB in \d+.\d s \(\d+ MB/s\)\n", capsys.readouterr().out
    )


def test_a_login_node_is_enough(models: dict, tmp_path: Path) -> None:
    """Neither NeMo nor Megatron-core nor transformers, either way."""
    back = str(tmp_path / "back")
    program = (
        "import sys\n"
        "for name in ('nemo', 'nemo_aligner', 'megatron', 'lightning', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from tepo_nemo import cli\n"
        f"sys.exit(cli.main(['convert', {str(models['llama'].nemo)!r}, {back!r}])\n"
        f"  or cli.main(['convert', {back!r}, {str(tmp_path / 'nemo')!r}]))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (answer.returncode, answer.stderr) == (0, "")
    weights = "model_weights/__0_0.distcp"
    assert (tmp_path / "nemo" / weights).read_bytes() == (models["llama"].nemo / weights).read_bytes()
