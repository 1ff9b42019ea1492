"""What NeMo is told, on a GPU and on a CPU."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.toy_files import make_math_files, make_model_files, make_toy_files

from tepo_nemo.config.load import load_config
from tepo_nemo.config.presets import choices
from tepo_nemo.nemo.host_config import host_config

ON_CPU_ONLY = {
    "use_cpu_initialization": True, "transformer_engine": False, "masked_softmax_fusion": False,
    "bias_activation_fusion": False, "bias_dropout_add_fusion": False,
}  # fmt: skip
REAL = [name for name in choices()["model"] if name != "toy"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_toy_files(tmp_path)
    make_math_files(tmp_path)
    make_model_files(tmp_path)


def model_section(*overrides: str):
    return host_config(load_config(overrides)).model


def test_a_checkpoint_made_on_a_cpu_leaves_nothing_of_it_in_a_run_on_gpus():
    """NeMo merges the configuration of a run into the one that lies in the checkpoint."""
    saved, run = model_section(), model_section("hardware=h100x8")
    merged = OmegaConf.merge(saved, run)
    for key, value in ON_CPU_ONLY.items():
        assert saved[key] is value and merged[key] is not value, key
    assert merged == run


def test_and_the_other_way_round():
    saved, run = model_section("hardware=h100x8"), model_section()
    assert OmegaConf.merge(saved, run) == run


def test_a_kernel_can_be_chosen_on_gpus():
    assert (
        model_section("hardware=h100x8", "model.masked_softmax_fusion=false").masked_softmax_fusion is False
    )
    assert model_section("hardware=h100x8", "model.apply_rope_fusion=true").apply_rope_fusion is True


@pytest.mark.parametrize("name", REAL)
def test_a_real_model_is_trained_in_production_mode(name):
    section = model_section(f"experiment=paper_{name}")
    assert (section.precision, section.megatron_amp_O2) == ("bf16", True)
    assert section.optim.name == "mcore_distributed_optim"
    assert section.sequence_parallel and section.tensor_model_parallel_size in (4, 8)
    assert section.activations_checkpoint_granularity == "full"
    assert section.transformer_engine and section.name == ""


@pytest.mark.parametrize(
    ("tensor", "rows"),
    [
        (1, 152064),  # 1188 x 128
        (2, 152064),  # 594 x 256
        (4, 152064),  # 297 x 512
        (8, 152576),  # 149 x 1024
    ],
)
def test_the_embedding_has_the_rows_of_the_checkpoint_not_those_of_the_tokenizer(tensor, rows):
    """Qwen2.5's tokenizer has 151665 entries, its embedding 152064 rows."""
    section = model_section(
        "experiment=paper_qwen2_5_14b",
        f"model.tensor_model_parallel_size={tensor}",
        f"model.sequence_parallel={str(tensor > 1).lower()}",
    )
    assert section.override_vocab_size == rows


def test_keys_of_llama_3_1_and_qwen3_reach_nemo():
    llama, qwen = (model_section(f"experiment=paper_{name}") for name in ("r1_distill_llama_8b", "qwen3_14b"))
    assert (llama.scale_positional_embedding, llama.scale_factor, llama.old_context_len) == (True, 8, 8192)
    assert (llama.low_freq_factor, llama.high_freq_factor, llama.rotary_base) == (1, 4, 500000)
    assert (qwen.qk_layernorm, qwen.kv_channels, qwen.layernorm_epsilon) == (True, 128, 1e-6)
