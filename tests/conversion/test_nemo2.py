"""Checkpoint folders of NeMo 2 in the host."""

from pathlib import Path

import pytest
import torch
from support.converted import Silent, host_of
from support.huggingface_models import VOCABULARY
from support.nemo2 import answer_with_nemo2, answer_without_reader, write_context
from support.worlds import Worlds
from torch import Tensor

from tepo_nemo.conversion import to_nemo
from tepo_nemo.conversion.convert import convert
from tepo_nemo.errors import UserError
from tepo_nemo.rollout.protocol import GenerationRequest

pytestmark = pytest.mark.timeout(300)

# A Llama 3.1 as NeMo 2 describes it, in its own words.
LLAMA = dict(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=88,
    num_attention_heads=6,
    num_query_groups=2,
    kv_channels=16,
    normalization="RMSNorm",
    layernorm_epsilon=1e-6,
    gated_linear_unit=True,
    add_bias_linear=False,
    add_qkv_bias=False,
    position_embedding_type="rope",
    rotary_base=100.0,
    rotary_percent=1.0,
    seq_length=64,
    scale_factor=8,
    low_freq_factor=1,
    high_freq_factor=4,
    old_context_len=32,
    share_embeddings_and_output_weights=False,
    make_vocab_size_divisible_by=128,
    context_parallel_size=2,
)


@pytest.fixture
def folder(models: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights of the small Llama under NeMo 2's names; its context is left to the test."""
    monkeypatch.setattr(to_nemo, "KEY_PREFIX", "module.")
    convert(models["llama"].huggingface, tmp_path / "made", watcher=Silent())
    folder = tmp_path / "nemo2"
    folder.mkdir()
    (tmp_path / "made" / "model_weights").rename(folder / "weights")
    return folder


def test_is_read(
    worlds: Worlds,
    models: dict,
    train: Path,
    folder: Path,
    tokens: Tensor,
    greedy: GenerationRequest,
) -> None:
    """Llama's scaling of the rotary embedding, which NeMo-Aligner does not translate, included."""
    write_context(folder, models["llama"].huggingface, **LLAMA)
    config = host_of(folder, train, tensor=2)
    answers = worlds(2, stack="nemo").run(answer_with_nemo2, config, tokens, greedy)
    logits = torch.cat([answer.logits for answer in answers], dim=-1)[..., :VOCABULARY]
    torch.testing.assert_close(logits, models["llama"].expected.logits, rtol=0, atol=1e-4)
    assert answers[0].responses == models["llama"].expected.greedy


def refusal(worlds: Worlds, function, config, tokens: Tensor, greedy: GenerationRequest) -> str:
    with pytest.raises(UserError) as caught:
        worlds(1, stack="nemo").run(function, config, tokens, greedy)
    return str(caught.value)


def test_a_window_is_refused(
    worlds: Worlds, models: dict, train: Path, folder: Path, tokens: Tensor, greedy: GenerationRequest
) -> None:
    write_context(folder, models["llama"].huggingface, **LLAMA, window_size=[32, 0])
    line = refusal(worlds, answer_with_nemo2, host_of(folder, train), tokens, greedy)
    assert line.startswith(f"model.restore_from_path={folder}: its layers attend to a window of [32, 0]")


def test_what_cannot_be_read_is_refused_with_the_reason(
    worlds: Worlds, models: dict, train: Path, folder: Path, tokens: Tensor, greedy: GenerationRequest
) -> None:
    write_context(folder, models["llama"].huggingface, **LLAMA)
    line = refusal(worlds, answer_without_reader, host_of(folder, train), tokens, greedy)
    assert line.startswith(
        f"model.restore_from_path={folder}: is a checkpoint of NeMo 2, and NeMo-Aligner cannot read it: its "
        "reader cannot be imported (No module named 'fiddle'"
    )


def test_an_unknown_tokenizer_is_refused_with_the_reason(
    worlds: Worlds, models: dict, train: Path, folder: Path, tokens: Tensor, greedy: GenerationRequest
) -> None:
    write_context(folder, models["llama"].huggingface, **LLAMA)
    model = folder / "context" / "model.yaml"
    model.write_text(model.read_text().replace("AutoTokenizer", "OwnTokenizer"))
    line = refusal(worlds, answer_with_nemo2, host_of(folder, train), tokens, greedy)
    assert line.endswith("its tokenizer or its configuration is of a kind that it does not know")
