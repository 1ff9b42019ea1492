"""TensorRT-LLM rollouts on NeMo's real exporter with a stand-in for the binary packages: whole runs, planted
mismatches, and what goes wrong."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.layouts import LAYOUTS, MODES
from support.once import once
from support.toy import ToyFolder
from support.toy_files import make_math_files, make_model_files
from support.trtllm_runs import (
    Call,
    Planted,
    Trained,
    build_with_faults,
    call_with_faults,
    engine_config,
    hang,
    lose_biases,
    make_even_toy,
    train,
)
from support.worlds import Worlds

from tepo_nemo.config.load import load_config
from tepo_nemo.config.schema import Config

pytestmark = pytest.mark.timeout(300)

VOCABULARY = 18
RUN = (
    f"model.vocab_size={VOCABULARY}",
    "data.reward=support.trtllm_runs.holds_a_seven",
    "algorithm.dynamic_sampling=false",
    "trainer.optimizer.learning_rate=1e-2",
    "trainer.updates_per_rollout=4",
    "trainer.micro_batch_size=null",
    "rollout.prompts_per_step=8",
    "rollout.responses_per_prompt=8",
)
BIASES = ("model.qkv_bias=true",)
ROPE_SCALING = (
    "model.scale_positional_embedding=true",
    "model.scale_factor=8",
    "model.low_freq_factor=1",
    "model.high_freq_factor=4",
    "model.old_context_len=32",
)


@pytest.fixture(scope="module")
def even_toy(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> ToyFolder:
    (folder,) = worlds(1, stack="nemo").run(make_even_toy, tmp_path_factory.mktemp("even"))
    return folder


def with_engine(config: Config, **engine: object) -> Config:
    """`rollout=trtllm`, which is refused on a CPU where a configuration is checked."""
    trtllm = config.rollout.trtllm.model_copy(update=engine)
    rollout = config.rollout.model_copy(update={"backend": "trtllm", "batch_size": 24, "trtllm": trtllm})
    return config.model_copy(update={"rollout": rollout})


# ----------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def learned(worlds: Worlds, even_toy: ToyFolder) -> Callable[[str, str], Trained]:
    """`learned(backend, layout)`: eight steps. At TP2 the engine stays loaded in between."""

    def work(backend: str, layout: str) -> Trained:
        config = LAYOUTS[layout].config(even_toy, *RUN, "trainer.max_steps=8")
        if backend == "trtllm":
            config = with_engine(config, unload=layout != "tp2")
        world = worlds(LAYOUTS[layout].ranks, stack="nemo")
        answers = world.run(train, config, {"it": Planted()}, timeout=110)
        return answers[0]["it"]

    return once(work)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_the_toy_is_learned(learned: Callable[[str, str], Trained], layout: str) -> None:
    """From the reward of random weights, as with the embedded engine. The gap stays that of rounding: every
    refit has brought the weights of its step."""
    run, embedded = learned("trtllm", layout), learned("megatron", "tp1")
    for trained in (run, embedded):
        rewards = [row["reward/mean"] for row in trained.metrics]
        assert trained.error is None and len(rewards) == 8
        assert rewards[0] < 0.6 and rewards[-1] > 0.9, rewards
    assert max(row["rollout/logprob_gap_mean"] for row in run.metrics) < 1e-5
    assert max(row["rollout/invalid_fraction"] for row in run.metrics) == 0


# ----------------------------------------------------------------- planted mismatches


def test_planted_mismatches_end_the_first_step_and_bf16_passes(worlds: Worlds, even_toy: ToyFolder) -> None:
    """At TP2 in production's mode, with biases and scaled positions as in Qwen2.5 and Llama 3.1 at once."""
    overrides = [
        *RUN, *BIASES, *ROPE_SCALING, *MODES["production"], "rollout.temperature=0.6", "trainer.max_steps=2",
    ]  # fmt: skip
    runs = {
        "nothing": Planted(),
        "other weights before": Planted(weights_before=True),
        "one layer is not refitted": Planted({"stale_layers": (1,)}, weights_before=True),
        "temperature is ignored": Planted({"ignores_temperature": True}),
        "scaling of positions is dropped": Planted({"ignores_rope_scaling": True}),
        "seeds are ignored": Planted({"ignores_seeds": True}),
        "stale": Planted({"stale": True}),
    }
    config = with_engine(LAYOUTS["tp2"].config(even_toy, *overrides))
    for found in worlds(2, stack="nemo").run(train, config, runs, timeout=110):
        for name in ("nothing", "other weights before"):
            assert found[name].error is None and len(found[name].metrics) == 2, name
            gaps = [row["rollout/logprob_gap_mean"] for row in found[name].metrics]
            assert 1e-5 < max(gaps) < 0.03, (name, gaps)
        for name in (
            "one layer is not refitted",
            "temperature is ignored",
            "scaling of positions is dropped",
        ):
            assert found[name].metrics == [] and "step 1: rollout.backend=trtllm and" in found[name].error, (
                name
            )
        assert "its seeds have no effect" in found["seeds are ignored"].error
        assert found["seeds are ignored"].metrics == []
        assert len(found["stale"].metrics) == 1 and "has no effect" in found["stale"].error


def test_biases_that_the_exporter_would_drop_are_missed(worlds: Worlds, even_toy: ToyFolder) -> None:
    """Left as it is, NeMo's exporter builds a Llama without biases, and writes a line into the log."""
    config = with_engine(LAYOUTS["tp1"].config(even_toy, *RUN, *BIASES))
    (message,) = worlds(1, stack="nemo").run(lose_biases, config, timeout=110)
    assert message.startswith(
        "TensorRT-LLM's engine cannot take the weights of the model; the model gives and the engine does not "
        "have: transformer.layers.0.attention.qkv.bias, transformer.layers.1.attention.qkv.bias"
    )


# ----------------------------------------------------------------- faults

CALLS = {
    "nothing": (Call({}), "fine"),
    "error": (Call({"error": True}), "RuntimeError: [TensorRT-LLM][ERROR] CUDA runtime error"),
    "too long": (Call({"longer_by": 1}), "RolloutError: TensorRT-LLM tells a length of "),
    "too short": (Call({"longer_by": -1}), "RolloutError: "),
    "zeros": (Call({"zero_logprobs": True}), "RolloutError: TensorRT-LLM returned log-probs that are all 0"),
    "bad id": (Call({"bad_id": 18}), "left out"),
    "no id": (Call({"bad_id": -42}), "RolloutError: TensorRT-LLM tells a length of "),
    "a refit again": (Call({}, refits=True), "fine"),
    "a name too many": (
        Call({"extra": ("transformer.layers.0.input_layernorm.bias",)}, refits=True),
        "RolloutError: TensorRT-LLM's engine cannot take the weights of the model; the engine has and the "
        "model does not give: transformer.layers.0.input_layernorm.bias",
    ),
    "a name too few": (
        Call({"folded": ("transformer.layers.1.mlp.gate.weight",)}, refits=True),
        "RolloutError: TensorRT-LLM's engine cannot take the weights of the model; the model gives and the "
        "engine does not have: transformer.layers.1.mlp.gate.weight",
    ),
    "refit fails": (
        Call({"refit_fails": True}, refits=True),
        "RolloutError: TensorRT has not taken the weights into the engine: Refit failed!",
    ),
    "afterwards": (Call({}, refits=True), "fine"),
}


def test_each_fault_has_its_message(worlds: Worlds, even_toy: ToyFolder) -> None:
    config = with_engine(LAYOUTS["tp1"].config(even_toy, *RUN))
    calls = {name: call for name, (call, _) in CALLS.items()}
    (messages,) = worlds(1, stack="nemo").run(call_with_faults, config, calls, timeout=110)
    for name, (_, expected) in CALLS.items():
        assert messages[name].startswith(expected), (name, messages[name])
    assert "on rank 0, a batch of 18 prompts of up to 9 tokens, 10 to generate" in messages["error"]


def test_ranks_that_draw_apart(worlds: Worlds, even_toy: ToyFolder) -> None:  # fault 26
    config = with_engine(LAYOUTS["tp2"].config(even_toy, *RUN))
    calls = {"apart": Call({"seeds_by_rank": True})}
    for messages in worlds(2, stack="nemo").run(call_with_faults, config, calls, timeout=110):
        assert "have drawn different tokens" in messages["apart"]


def test_what_does_not_fit_is_refused_before_an_engine_is_built(worlds: Worlds, even_toy: ToyFolder) -> None:
    config = with_engine(LAYOUTS["tp1"].config(even_toy, *RUN))
    (found,) = worlds(1, stack="nemo").run(
        build_with_faults, config, [{"mpi_rank": 3}, {"without_multi_block_mode": True}], timeout=110
    )
    assert found[0] == (
        "UserError: rollout.backend=trtllm: rank 0 of torch is rank 3 of MPI, and TensorRT-LLM takes them to "
        "be one (start the ranks with `srun --mpi=pmix`, or with mpirun in the same order)"
    )
    assert found[1].startswith(
        "UserError: rollout.backend=trtllm: the installed packages do not fit together, "
    )
    assert "ModelRunner.from_engine(multi_block_mode)" in found[1] and "\n" not in found[1]


def test_a_batch_that_never_comes_back_ends_the_rank() -> None:
    program = (
        "import time\nfrom tepo_nemo.nemo.rollout.trtllm.time_limit import time_limit\n"
        "with time_limit(60, 'a quick batch'): pass\n"
        "with time_limit(0.3, 'TensorRT-LLM on rank 0, a batch of 4 prompts'): time.sleep(60)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert answer.returncode == 1
    assert answer.stderr == (
        "TensorRT-LLM on rank 0, a batch of 4 prompts has taken more than rollout.trtllm.time_limit=0.3 s: "
        "it hangs, or the limit is too low; the run ends\n"
    )


def test_an_engine_that_hangs_does_not_hold_its_rank(worlds: Worlds, even_toy: ToyFolder) -> None:
    """The message of the rank is that of the test above."""
    config = with_engine(LAYOUTS["tp1"].config(even_toy, *RUN), time_limit=0.5)
    with pytest.raises(RuntimeError, match="rank 0 died"):
        worlds(1, stack="nemo").run(hang, config, timeout=110)


def test_nothing_of_tensorrt_llm_is_imported_without_it() -> None:
    """It starts MPI. (Fault 33.)"""
    for path in (Path(__file__).parents[2] / "tepo_nemo").rglob("*.py"):
        at_top = [line for line in path.read_text().splitlines() if line.startswith(("import", "from"))]
        assert not any("tensorrt" in line or "nemo.export" in line for line in at_top), path


# ----------------------------------------------------------------- the models of the paper

LLAMA = {"architecture": "LlamaForCausalLM", "attn_bias": False, "mlp_bias": False, "norm_epsilon": 1e-5}
QWEN = {
    "architecture": "QWenForCausalLM", "qwen_type": "qwen2", "attn_bias": True, "mlp_bias": False,
    "use_logn_attn": False, "rotary_base": 1000000, "rotary_scaling": None, "vocab_size": 152064,
    "max_position_embeddings": 131072, "seq_length": 131072,
}  # fmt: skip
FIELDS = {
    # From the published config.json of each, under TensorRT-LLM's names.
    "qwen2_5_7b": QWEN | {
        "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_key_value_heads": 4, "head_size": 128, "norm_epsilon": 1e-6,
    },
    "qwen2_5_14b": QWEN | {
        "num_hidden_layers": 48, "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_size": 128,
    },
    "r1_distill_llama_8b": LLAMA | {
        "rotary_base": 500000, "vocab_size": 128256, "num_key_value_heads": 8, "intermediate_size": 14336,
        "rotary_scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mistral_7b_instruct": LLAMA | {
        "rotary_base": 1000000, "rotary_scaling": None, "vocab_size": 32000, "num_key_value_heads": 8,
        "intermediate_size": 14336, "num_hidden_layers": 32, "hidden_size": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize("model", FIELDS)
def test_engine_of_a_model_of_the_paper(
    worlds: Worlds, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_math_files(tmp_path)
    make_model_files(tmp_path)
    config = load_config([f"model={model}", "hardware=h100x8", "data=math", "rollout=trtllm"])
    (found,) = worlds(1, stack="nemo").run(engine_config, config)
    shared = {
        "dtype": "bfloat16", "logits_dtype": "float32", "hidden_act": "silu", "head_size": 128,
        "position_embedding_type": "rope_gpt_neox", "rotary_pct": 1.0, "use_parallel_embedding": True,
        "share_embedding_table": False,
    }  # fmt: skip
    expected = shared | FIELDS[model]
    assert {key: found[key] for key in expected} == expected
    assert found["mapping"]["tp_size"] == config.model.tensor_model_parallel_size
