"""What is refused: exit code 2, one line that names the file and what is wrong, and nothing left behind."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.converted import Silent
from support.huggingface_models import make_model

from tepo_nemo import cli
from tepo_nemo.conversion.convert import convert

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(autouse=True)
def _own_signals() -> Any:
    """The command changes what SIGTERM does."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def source(models: dict, tmp_path: Path) -> Path:
    """A copy of an untied Qwen2.5 in three files, to be spoilt."""
    return Path(shutil.copytree(models["qwen2_5"].huggingface, tmp_path / "in" / "model"))


@pytest.fixture
def checkpoint(models: dict, tmp_path: Path) -> Path:
    """A copy of the checkpoint that it becomes."""
    return Path(shutil.copytree(models["qwen2_5"].nemo, tmp_path / "in" / "checkpoint"))


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """`refusal(source, *options)`: the line; the folder of the output stays as it is."""

    def run(source: Path, *options: str, output: Path = tmp_path / "out" / "model") -> str:
        if not output.parent.exists():
            output.parent.mkdir()
        before = sorted(output.parent.rglob("*"))
        assert cli.main(["convert", str(source), str(output), *options]) == 2
        streams = capsys.readouterr()
        assert streams.out == "" and streams.err.count("\n") == 1, streams
        assert sorted(output.parent.rglob("*")) == before
        return streams.err.removeprefix("tepo-nemo: error: ").rstrip("\n")

    return run


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of a config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_shard(folder: Path, change: Callable[[dict], None]) -> None:
    """Change the tensors of one file."""
    tensors = load_file(folder / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD)


# ----------------------------------------------------------------- from Hugging Face


def test_a_missing_file(source: Path, refusal: Callable[..., str]) -> None:
    (source / SHARD).unlink()
    assert refusal(source) == (
        f"{source / SHARD}: is missing, model.safetensors.index.json names it (fetch it again)"
    )


def test_a_file_that_is_cut_off(source: Path, refusal: Callable[..., str]) -> None:
    content = (source / SHARD).read_bytes()
    (source / SHARD).write_bytes(content[:-7])
    assert refusal(source).startswith(f"{source / SHARD}: is no whole safetensors file (")


def test_no_weights(source: Path, refusal: Callable[..., str]) -> None:
    for file in source.glob("model*"):
        file.unlink()
    assert refusal(source) == (
        f"{source}: has no model.safetensors and no index of one (give a folder with weights)"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            'architectures=["GPT2LMHeadModel"]: unknown (known are Qwen2F',
        ),
        ({"num_hidden_layers": None}, "num_hidden_layers=null: must be a positive number"),
        ({"rope_theta": None}, "rope_theta=null: must be a positive number"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported, only "silu" is'),
        ({"quantization_config": {"bits": 4}}, 'quantization_config={"bits": 4} is not supported'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_scaling: the type "yarn" is not supp'),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4: must divide num_attention_heads=6"),
        ({"torch_dtype": "float64"}, 'torch_dtype="float64": is none of float32, bfloat16, float16'),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_of_another_model(
    source: Path, refusal: Callable[..., str], changes: dict[str, Any], words: str
) -> None:
    edit(source, **changes)
    line = refusal(source)
    assert line.startswith(f"{source / 'config.json'}: ") and words in line


def test_weights_of_another_size(source: Path, refusal: Callable[..., str]) -> None:
    edit(source, intermediate_size=96)
    assert refusal(source) == (
        f"{source}: model.layers.0.mlp.gate_proj.weight has the shape [88, 48], its config.json says "
        "[96, 48] (fetch the model again)"
    )


def test_weights_of_another_type(source: Path, refusal: Callable[..., str]) -> None:
    edit(source, torch_dtype="bfloat16")
    assert "is float32, its config.json says torch_dtype=bfloat16 (correct torch_dtype" in refusal(source)


def test_a_missing_weight(source: Path, refusal: Callable[..., str]) -> None:
    edit_shard(source, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias"))
    assert refusal(source) == (
        f"{source}: the weight model.layers.1.self_attn.k_proj.bias is missing (fetch the model again)"
    )


def test_a_weight_of_no_such_model(source: Path, refusal: Callable[..., str]) -> None:
    edit_shard(source, lambda tensors: tensors.update({"model.layers.1.lora_A.weight": torch.zeros(2)}))
    assert "model.layers.1.lora_A.weight is no weight of Qwen2ForCausalLM" in refusal(source)


def test_a_tied_output_layer_that_differs(source: Path, refusal: Callable[..., str]) -> None:
    edit(source, tie_word_embeddings=True)
    assert refusal(source) == (
        f"{source}: lm_head.weight differs from the embedding and its config.json ties them (set "
        "tie_word_embeddings=false)"
    )


def test_a_tied_output_layer_that_is_the_embedding(models: dict, tmp_path: Path) -> None:
    """Some files have it twice."""
    folder = Path(shutil.copytree(models["qwen2_5_tied"].huggingface, tmp_path / "twice"))
    (first,) = [
        file for file in folder.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(file)
    ]
    tensors = load_file(first)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, first)
    convert(folder, tmp_path / "nemo", watcher=Silent())


def test_a_window_that_the_sequence_exceeds(tmp_path: Path, refusal: Callable[..., str]) -> None:
    folder = make_model("mistral", tmp_path / "mistral", sliding_window=16)
    assert refusal(folder) == (
        "--sequence-length=64: the model attends to the last 16 positions (sliding_window of its "
        "config.json), NeMo to all (set --sequence-length=16 or less)"
    )
    assert cli.main(["convert", str(folder), str(tmp_path / "nemo"), "--sequence-length", "16"]) == 0
    assert "encoder_seq_length: 16\n" in (tmp_path / "nemo" / "model_config.yaml").read_text()


# ----------------------------------------------------------------- pickles


@pytest.fixture
def pickled(source: Path) -> Path:
    """The same model as torch.save writes it."""
    tensors: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    for file in source.glob("model*"):
        file.unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    return source


def test_a_pickle_is_read_when_asked_for(
    pickled: Path, models: dict, refusal: Callable[..., str], tmp_path: Path
) -> None:
    assert refusal(pickled) == (
        f"{pickled}: has weights in pytorch_model.bin alone, which is a pickle (save it as safetensors, or "
        "add --pickle to read it with weights_only=True)"
    )
    assert cli.main(["convert", str(pickled), str(tmp_path / "nemo"), "--pickle"]) == 0
    weights = "model_weights/__0_0.distcp"
    assert (tmp_path / "nemo" / weights).read_bytes() == (models["qwen2_5"].nemo / weights).read_bytes()


class Hostile:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_something(
    pickled: Path, refusal: Callable[..., str], tmp_path: Path
) -> None:
    torch.save({"model.norm.weight": Hostile(tmp_path / "owned")}, pickled / "pytorch_model.bin")
    assert refusal(pickled, "--pickle").startswith(
        f"{pickled / 'pytorch_model.bin'}: holds no plain weights ("
    )
    assert not (tmp_path / "owned").exists()


# ----------------------------------------------------------------- from NeMo


def test_a_changed_file(checkpoint: Path, refusal: Callable[..., str]) -> None:
    with open(checkpoint / "model_weights" / "__0_0.distcp", "r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-100, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    line = refusal(checkpoint)
    assert line.startswith(f"{checkpoint}: model_weights/__0_0.distcp has sha256 ")
    assert "its manifest.json says" in line


def test_a_lost_file(checkpoint: Path, refusal: Callable[..., str]) -> None:
    (checkpoint / "huggingface" / "tokenizer.json").unlink()
    assert refusal(checkpoint) == (
        f"{checkpoint}: huggingface/tokenizer.json is missing, its manifest.json names it (make it again)"
    )


def test_weights_that_are_cut_off(checkpoint: Path, refusal: Callable[..., str]) -> None:
    (checkpoint / "manifest.json").unlink()
    weights = checkpoint / "model_weights" / "__0_0.distcp"
    weights.write_bytes(weights.read_bytes()[:-50_000])
    assert refusal(checkpoint) == (
        f"{checkpoint}: model_weights/__0_0.distcp is cut off (give a whole checkpoint)"
    )


@pytest.mark.parametrize("name", ["model_weights/.metadata", "model_weights/metadata.json"])
def test_no_metadata(checkpoint: Path, refusal: Callable[..., str], name: str) -> None:
    (checkpoint / name).unlink()
    assert refusal(checkpoint) == (
        f"{checkpoint}: {name} cannot be read (No such file or directory); give a whole checkpoint"
    )


def test_metadata_that_would_run_something(
    checkpoint: Path, refusal: Callable[..., str], tmp_path: Path
) -> None:
    (checkpoint / "model_weights" / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "owned")))
    assert "model_weights/.metadata cannot be read (names posix.mkdir)" in refusal(checkpoint)
    assert not (tmp_path / "owned").exists()


def test_a_checkpoint_of_another_size(checkpoint: Path, refusal: Callable[..., str]) -> None:
    edit(checkpoint / "huggingface", hidden_size=64)
    line = refusal(checkpoint)
    assert "model_config.yaml has hidden_size=48 and huggingface/config.json means 64" in line


def test_weights_that_the_config_does_not_mean(checkpoint: Path, refusal: Callable[..., str]) -> None:
    (checkpoint / "model_config.yaml").write_text("{mcore_gpt: true}\n")
    edit(checkpoint / "huggingface", vocab_size=1000)
    assert (
        "model.embedding.word_embeddings.weight has the shape [256, 48], its huggingface/config.json means "
        "[1024, 48]"
    ) in refusal(checkpoint)


def test_a_checkpoint_of_no_model_of_hugging_face(checkpoint: Path, refusal: Callable[..., str]) -> None:
    shutil.rmtree(checkpoint / "huggingface")
    assert refusal(checkpoint).startswith(
        f"{checkpoint}: keeps no huggingface/config.json, so it does not descend from a model of Hugging Face"
    )


@pytest.mark.parametrize(
    "options", [["--pickle"], ["--sequence-length", "32"]], ids=lambda options: options[0]
)
def test_options_of_the_other_direction(
    checkpoint: Path, refusal: Callable[..., str], options: list[str]
) -> None:
    assert refusal(checkpoint, *options) == f"{options[0]}: says nothing about a NeMo checkpoint (remove it)"


def test_no_checkpoint_at_all(tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "in").mkdir()
    assert refusal(tmp_path / "in").startswith(f"{tmp_path / 'in'}: is no folder of Hugging Face (with a")
    (tmp_path / "file.nemo").write_text("nothing")
    assert refusal(tmp_path / "file.nemo").startswith(f"{tmp_path / 'file.nemo'}: is no .nemo archive (")
    with tarfile.open(tmp_path / "packed.nemo", "w:gz"):
        pass
    assert refusal(tmp_path / "packed.nemo") == (
        f"{tmp_path / 'packed.nemo'}: is compressed (unpack it, and give the folder)"
    )


# ----------------------------------------------------------------- the output


@pytest.mark.parametrize("direction", ["source", "checkpoint"])
def test_an_output_that_exists(
    request: pytest.FixtureRequest, refusal: Callable[..., str], tmp_path: Path, direction: str
) -> None:
    output = tmp_path / "out" / "model"
    output.mkdir(parents=True)
    (output / "mine").write_text("kept")
    assert refusal(request.getfixturevalue(direction)) == (
        f"{output}: the folder is not empty; choose another one, or move it away"
    )


def test_an_archive_that_exists(source: Path, refusal: Callable[..., str], tmp_path: Path) -> None:
    output = tmp_path / "out" / "model.nemo"
    output.parent.mkdir()
    output.write_text("kept")
    assert refusal(source, output=output) == (
        f"{output}: exists already; choose another name, or move it away"
    )
    assert output.read_text() == "kept"


def test_an_archive_of_hugging_face(checkpoint: Path, refusal: Callable[..., str], tmp_path: Path) -> None:
    output = tmp_path / "out" / "model.nemo"
    assert refusal(checkpoint, output=output) == (
        f"{output}: a NeMo checkpoint becomes a folder of Hugging Face (give a folder)"
    )


def test_a_disk_with_too_little_room(
    source: Path, refusal: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=50 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert refusal(source) == (
        f"{tmp_path / 'out' / 'model'}: takes 0.06 GiB and its disk has 0.05 GiB left (make room, or choose "
        "another disk)"
    )


def test_a_place_that_cannot_be_written(source: Path, refusal: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    assert refusal(source, output=tmp_path / "out" / "model").startswith(
        f"{tmp_path / 'out' / 'model'}: cannot"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A disk of its own with room for a part of the model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = "size=96k"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root can mount a disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("direction", ["source", "checkpoint", "archive"])
def test_a_disk_that_fills_up(
    request: pytest.FixtureRequest,
    refusal: Callable[..., str],
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    direction: str,
) -> None:
    """As when others write to it, too: there was room enough at the start."""
    monkeypatch.setattr("tepo_nemo.conversion.convert.check_room", lambda path, size: None)
    given = request.getfixturevalue("checkpoint" if direction == "checkpoint" else "source")
    output = small_disk / ("model.nemo" if direction == "archive" else "model")
    assert refusal(given, output=output) == f"{output}: its disk is full (make room, or choose another disk)"


def test_what_an_interrupted_conversion_left_is_removed(source: Path, tmp_path: Path) -> None:
    """But not what belongs to an output of a similar name, which may be being made."""
    for name in (".nemo.12345.partial", ".nemo.nemo.12345.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("a file")
    convert(source, tmp_path / "nemo", watcher=Silent())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".nemo.nemo.12345.partial", "in", "nemo"]


@pytest.mark.parametrize("output", ["nemo", "nemo.nemo"])
def test_a_job_that_is_told_to_end(source: Path, tmp_path: Path, output: str) -> None:
    """SIGTERM in the middle of the weights."""
    program = (
        "import os, signal, sys\n"
        "from tepo_nemo import cli\n"
        "from tepo_nemo.commands import convert\n"
        "def advance(bar, count):\n"
        "    if bar.stage == 'converting': os.kill(os.getpid(), signal.SIGTERM)\n"
        "def begin(bar, stage, size): bar.stage = stage\n"
        "convert._Bar.advance, convert._Bar.begin = advance, begin\n"
        f"sys.exit(cli.main(['convert', {str(source)!r}, {str(tmp_path / 'out' / output)!r}]))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout, answer.stderr) == (1, "", "tepo-nemo: error: interrupted\n")
    assert list((tmp_path / "out").iterdir()) == []
