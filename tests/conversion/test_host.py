"""What the host makes of a converted checkpoint beyond reading it: names, training, saving."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.converted import (
    Silent,
    answer_all,
    change_and_save,
    gradients_of,
    host_of,
    load_objects,
    names_of,
)
from support.gather import Part, whole
from support.huggingface_models import VOCABULARY, add_tokenizer, all_weights, logits_of, make_model
from support.once import once
from support.synthetic import synthetic_batch
from support.worlds import Worlds
from torch import Tensor

from tepo_nemo.conversion.archive import Checkpoint
from tepo_nemo.conversion.convert import convert
from tepo_nemo.conversion.nemo_config import read_architecture
from tepo_nemo.conversion.to_nemo import KEY_PREFIX
from tepo_nemo.conversion.weights import WEIGHTS, extra_state_keys, weights_of
from tepo_nemo.errors import UserError
from tepo_nemo.rollout.protocol import GenerationRequest

pytestmark = pytest.mark.timeout(300)  # the first test to need a layout waits for it


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_the_kept_list_is_what_megatron_saves(worlds: Worlds, models: dict, train: Path, name: str) -> None:
    """Tensors to the shape. Objects at least: a Transformer Engine layer asks for more than a plain one."""
    (found,) = worlds(1, stack="nemo").run(names_of, host_of(models[name].nemo, train))
    architecture = read_architecture(Checkpoint(models[name].nemo))
    sizes = architecture.sizes
    kept = {
        KEY_PREFIX + weight.nemo: (sizes.layers, *weight.shape(sizes))
        if weight.in_layers
        else weight.shape(sizes)
        for weight in weights_of(architecture)
    }
    assert {key: shape for key, shape in found.items() if shape is not None} == kept
    objects = {key for key, shape in found.items() if shape is None}
    assert objects and objects <= {KEY_PREFIX + key for key in extra_state_keys(architecture)}


def test_every_extra_state_is_there_and_empty(worlds: Worlds, models: dict, train: Path) -> None:
    model = models["qwen3"].nemo
    keys = [KEY_PREFIX + key for key in extra_state_keys(read_architecture(Checkpoint(model)))]
    assert len(keys) == 2 * 7 + 1  # seven modules of two layers, and the last norm
    (values,) = worlds(1, stack="nemo").run(
        load_objects, host_of(model, train), model / "model_weights", keys
    )
    assert values == [None] * len(keys)


def test_fused_names_are_those_of_transformer_engine() -> None:
    """As Megatron-core's own export knows them; it has no Qwen3."""
    root = Path(importlib.util.find_spec("megatron.core").submodule_search_locations[0])
    source = (root / "export/trtllm/model_to_trllm_mapping/default_conversion_dict.py").read_text()
    known = set(re.findall(r"'([\w.]+)':", source))
    assert {weight.nemo for weight in WEIGHTS if weight.needs != "qk_layernorm"} <= known


@pytest.mark.parametrize("name", ["qwen2_5_tied", "llama", "qwen3"])
def test_a_trained_checkpoint_goes_back(
    worlds: Worlds, models: dict, train: Path, tokens: Tensor, name: str, tmp_path: Path
) -> None:
    """Weights that two tensor-parallel ranks have changed and saved, in transformers."""
    config = host_of(models[name].nemo, train, tensor=2)
    ranks = worlds(2, stack="nemo").run(change_and_save, config, tokens, tmp_path / "step.nemo", 1.01)
    convert(tmp_path / "step.nemo", tmp_path / "back", watcher=Silent())
    before, after = all_weights(models[name].huggingface), all_weights(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value * 1.01, rtol=1e-6, atol=0, msg=key)
    for file in models[name].huggingface.glob("*"):
        if ".safetensors" not in file.name:
            assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes(), file.name
    if name != "qwen3":  # which the pinned transformers does not have
        logits = torch.cat([rank.logits for rank in ranks], dim=-1)[..., :VOCABULARY]
        torch.testing.assert_close(logits, logits_of(tmp_path / "back", tokens), rtol=0, atol=1e-4)


def test_production_mode_saves_the_bits_that_it_was_given(
    worlds: Worlds, train: Path, tokens: Tensor, tmp_path: Path
) -> None:
    """bf16 weights, Megatron's distributed optimizer, two stages."""
    source = make_model("qwen2_5_tied", tmp_path / "model", torch.bfloat16)
    convert(source, tmp_path / "nemo", watcher=Silent())
    production = (
        "model.precision=bf16", "model.megatron_amp_O2=true", "trainer.optimizer.name=distributed_adam",
    )  # fmt: skip
    config = host_of(tmp_path / "nemo", train, *production, pipeline=2)
    worlds(2, stack="nemo").run(change_and_save, config, tokens, tmp_path / "step.nemo", 1.0)
    convert(tmp_path / "step.nemo", tmp_path / "back", watcher=Silent())
    before, after = all_weights(source), all_weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(after[key].dtype == torch.bfloat16 and torch.equal(after[key], before[key]) for key in before)


def test_an_id_that_is_no_token_is_never_drawn(worlds: Worlds, train: Path, tmp_path: Path) -> None:
    """The embedding has 131 rows and the tokenizer 17 tokens; Qwen's embeddings have such rows, too."""
    source = make_model("qwen2_5", tmp_path / "model")
    for file in source.glob("*token*"):
        file.unlink()
    add_tokenizer(source, tokens=17)
    convert(source, tmp_path / "nemo", watcher=Silent())
    request = GenerationRequest(
        prompt_tokens=[[5, 6]] * 16,
        prompt_keys=list(range(16)),
        sample_indices=[0] * 16,
        seed=1,
        temperature=1.0,
        max_response_lengths=[10] * 16,
    )
    config = host_of(tmp_path / "nemo", train)
    (answers,) = worlds(1, stack="nemo").run(answer_all, {"": config}, torch.zeros(1, 2, dtype=int), request)
    drawn = {token for row in answers[""].responses for token in row}
    assert max(drawn) < 17 and len(drawn) > 8


@pytest.fixture(scope="module")
def gradients(worlds: Worlds, models: dict, train: Path) -> Callable[..., dict[str, Tensor]]:
    """`gradients(tensor, *overrides)`: whole gradients of Qwen3 at a layout."""

    def work(tensor: int, *overrides: str) -> dict[str, Tensor]:
        config = host_of(models["qwen3"].nemo, train, *overrides, tensor=tensor)
        parts: list[Part] = worlds(tensor, stack="nemo").run(gradients_of, config, synthetic_batch())
        return whole(parts, vocabulary=VOCABULARY, tied=False)

    return once(work)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.sequence_parallel=true",),
        ("trainer.optimizer.name=distributed_adam",),
    ],
    ids=["plain", "sequence parallel", "distributed optimizer"],
)
def test_norms_of_queries_and_keys_see_all_heads(
    gradients: Callable[..., dict[str, Tensor]], overrides: tuple[str, ...]
) -> None:
    """Each tensor-parallel rank has some of the heads; the gradient of their common norm is the sum."""
    one, two = gradients(1), gradients(2, *overrides)
    assert all(value.abs().max() > 1e-4 for name, value in one.items() if "q_layernorm" in name)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("model.encoder_seq_length=32",),
            "model.encoder_seq_length=32: the model attends to the last 16 pos",
        ),
        (
            ("model.rotary_base=10000",),
            "model.rotary_base=10000.0: {path} has 1000000.0; set model.rotary_base",
        ),
        (
            ("model.qk_layernorm=true",),
            "model.qk_layernorm=True: {path} has False; set model.qk_layernorm=Fals",
        ),
        (
            ("model.tensor_model_parallel_size=3", "model.vocab_size=null", "hardware.devices_per_node=3"),
            "model.tensor_model_parallel_size=3: must divide the 256 rows of the embedding in {path}",
        ),
    ],
    ids=["window", "base", "layers", "rows"],
)
def test_another_model_than_the_checkpoint_is_refused(
    worlds: Worlds, train: Path, tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    path = tmp_path / "nemo"
    convert(
        make_model("mistral", tmp_path / "hf", sliding_window=16), path, sequence_length=16, watcher=Silent()
    )
    with pytest.raises(UserError) as caught:
        worlds(1, stack="nemo").run(names_of, host_of(path, train, *overrides))
    assert str(caught.value).startswith(words.format(path=path))
