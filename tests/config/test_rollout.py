"""What a rollout engine of TensorRT-LLM is refused for, and options of the check and the correction."""

from pathlib import Path

import pytest
from support.toy_files import make_math_files, make_model_files

from tepo_nemo.config.load import dump_config, load_config
from tepo_nemo.config.presets import choices
from tepo_nemo.errors import UserError

TAKEN = ["mistral_7b_instruct", "qwen2_5_14b", "qwen2_5_7b", "r1_distill_llama_8b"]


def real(model: str, *overrides: str) -> list[str]:
    return [f"model={model}", "hardware=h100x8", "data=math", "rollout=trtllm", *overrides]


@pytest.mark.parametrize("model", TAKEN)
def test_models_of_the_paper_are_taken(model: str) -> None:
    config = load_config(real(model))
    assert config.rollout.backend == "trtllm" and config.rollout.batch_size == 128
    assert config.model.vocab_size % config.model.tensor_model_parallel_size == 0


def test_every_model_is_taken_or_refused_above() -> None:
    assert set(choices()["model"]) == {*TAKEN, "qwen3_14b", "toy"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Composed once: the checks are the same."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_math_files(folder)
        make_model_files(folder)
        (folder / "config.yaml").write_text(dump_config(load_config(real("qwen2_5_7b"))))
    return folder / "config.yaml"


OTHERWISE = "(set rollout=megatron or rollout=server)"
FAMILY = "since its engine of the Llama family has"
MISTAKES = [
    (["model.normalization=layernorm"], f"{FAMILY} no other normalization {OTHERWISE}"),
    (["model.activation=geglu"], f"{FAMILY} no other activation {OTHERWISE}"),
    (["model.bias=true"], f"{FAMILY} biases in queries, keys and values alone {OTHERWISE}"),
    (["model.position_embedding_type=learned_absolute"], f"{FAMILY} no other position embedding {OTHERWISE}"),
    (["model.rotary_percentage=0.5"], f"its engine of the Llama family rotates whole heads {OTHERWISE}"),
    (["model.share_embeddings_and_output_weights=true"], "differ in how they refit a tied embedding"),
    (["model.seq_len_interpolation_factor=2"], "only Llama 3.1's scaling of positions has been compared"),
    (["rollout.batch_size=null"], "rollout.batch_size=null: an engine of TensorRT-LLM is built for a number"),
    (["hardware.accelerator=cpu"], f"trtllm: needs GPUs, and hardware.accelerator=cpu {OTHERWISE}"),
    (
        ["model.vocab_size=152063"],
        "model.tensor_model_parallel_size=4: must divide model.vocab_size=152063 with rollout.backend=trtllm",
    ),
    (
        [
            "model.megatron_amp_O2=false", "model.sequence_parallel=false", "trainer.optimizer.name=adam",
            "model.pipeline_model_parallel_size=2",
        ],
        "model.megatron_amp_O2=false: with model.pipeline_model_parallel_size=2 the exporter of",
    ),
    (
        ["rollout.backend=megatron", "rollout.trtllm.unload=false"],
        "rollout.trtllm.unload=false: has no effect with rollout.backend=megatron (remove it)",
    ),
    (
        ["rollout.check.warn_gap=0.2"],
        "rollout.check.warn_gap=0.2: is above rollout.check.stop_gap=0.1, so that no warning",
    ),
    (["rollout.check.warn_error=1.6"], "rollout.check.warn_error=1.6: is above rollout.check.stop_error=1.5"),
    (
        ["rollout.correction.truncation=3.0"],
        "rollout.correction.truncation=3.0: has no effect with rollout.correction.token_weight=none (",
    ),
    (
        ["rollout.correction.token_weight=icepop", "rollout.correction.truncation=3.0"],
        "rollout.correction.truncation=3.0: has no effect with rollout.correction.token_weight=icepop",
    ),
    (
        ["rollout.correction.token_weight=truncated", "rollout.correction.icepop_low=0.4"],
        "rollout.correction.icepop_low=0.4: has no effect with rollout.correction.token_weight=truncated",
    ),
    (
        ["rollout.correction.token_weight=icepop", "rollout.correction.icepop_low=6.0"],
        "rollout.correction.icepop_low=6.0: must be below rollout.correction.icepop_high=5.0",
    ),
    (["rollout.correction.token_weight=sequence"], "must be one of none, truncated, icepop"),
    (["rollout.correction.response_gap_limit=0"], "must be greater than 0"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=[" ".join(given) for given, _ in MISTAKES])
def test_refused_in_one_line(saved: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(overrides, saved)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_qwen3_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(UserError) as caught:
        load_config(real("qwen3_14b"))
    assert str(caught.value) == (
        "model.qk_layernorm=true: rollout.backend=trtllm cannot generate with it, since TensorRT-LLM has no "
        "engine that normalizes queries and keys, as Qwen3 does, before its release 1.0, which NeMo 2.2 "
        "cannot use (set rollout=megatron or rollout=server)"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.correction.token_weight=truncated", "rollout.correction.truncation=3.0"],
        ["rollout.correction.token_weight=icepop", "rollout.correction.icepop_high=4.0"],
        ["rollout.correction.response_gap_limit=0.5"],
        [
            "rollout.trtllm.unload=false",
            "rollout.trtllm.engine_folder=engines",
            "rollout.trtllm.time_limit=60",
        ],
        ["rollout.check.interval=0", "rollout.check.stop_gap=0.05"],
    ],
)
def test_taken(saved: Path, overrides: list[str]) -> None:
    load_config(overrides, saved)
