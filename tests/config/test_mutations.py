"""A paper run, broken in one field after the other: every break is refused with a line that names the key."""

from pathlib import Path

import pytest
from support.toy_files import make_math_files, make_model_files

from tepo_nemo.config.load import dump_config, load_config
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_math_files(folder)
        make_model_files(folder)
        (folder / "config.yaml").write_text(dump_config(load_config(["experiment=paper_qwen2_5_7b"])))
    return folder / "config.yaml"


# field -> what breaks it
BREAKS = {
    "seed": "-1",
    "output": "[a]",
    # the model: types and ranges
    "model.name": "7",
    "model.tokenizer": "Qwen",
    "model.tokenizer.type": "/nowhere",
    "model.tokenizer.library": "sentencepiece",
    "model.restore_from_path": "/nowhere/a.nemo",
    "model.vocab_size": "0",
    "model.precision": "fp16",
    "model.megatron_amp_O2": "maybe",
    "model.normalization": "batchnorm",
    "model.activation": "relu6",
    "model.bias": "1",
    "model.qkv_bias": "some",
    "model.qk_layernorm": "2",
    "model.position_embedding_type": "alibi",
    "model.rotary_base": "-1",
    "model.rotary_percentage": "1.5",
    "model.share_embeddings_and_output_weights": "tied",
    "model.make_vocab_size_divisible_by": "0",
    "model.activations_checkpoint_granularity": "uniform",
    "model.hidden_dropout": "0.1",
    "model.attention_dropout": "0.1",
    "model.ffn_dropout": "0.1",
    "model.extra": "5",
    # the model: arithmetic
    "model.num_attention_heads": "30",
    "model.num_query_groups": "5",
    "model.kv_channels": "127",
    "model.hidden_size": "3585",
    "model.ffn_hidden_size": "18945",
    "model.num_layers": "0",
    "model.encoder_seq_length": "8192",
    "model.max_position_embeddings": "8193",
    "model.tensor_model_parallel_size": "8",
    "model.pipeline_model_parallel_size": "3",
    "model.sequence_parallel": "yes please",
    # what is not built, or said elsewhere
    "model.context_parallel_size": "2",
    "model.virtual_pipeline_model_parallel_size": "2",
    "model.num_moe_experts": "8",
    "model.fp8": "true",
    "model.micro_batch_size": "4",
    "model.global_batch_size": "64",
    "model.mcore_gpt": "false",
    "model.layer_norm_epsilon": "1e-6",
    # the method
    "algorithm.name": "7",
    "algorithm.advantage": "gae",
    "algorithm.overlong_fraction": "2",
    "algorithm.dynamic_sampling": "often",
    "algorithm.max_generation_batches": "0",
    "algorithm.surrogate": "trust-region",
    "algorithm.ratio": "geometric",
    "algorithm.ratio_gradient": "half",
    "algorithm.clip_low": "-0.2",
    "algorithm.clip_high": "nan",
    "algorithm.kl_estimator": "k4",
    "algorithm.kl_coefficient": "inf",
    "algorithm.kl_mask": "some",
    "algorithm.entropy_drop": "variance",
    "algorithm.entropy_drop_tolerance": "-1",
    "algorithm.aggregation": "mean",
    "algorithm.entropy_bonus": "-0.1",
    "algorithm.dual_clip": "3",
    # the data
    "data.train": "/nowhere.jsonl",
    "data.reward": "[]",
    "data.evaluation": "aime24",
    "data.grading.workers": "0",
    "data.grading.time_limit": "0",
    "data.grading.memory_limit_gib": "-1",
    "data.grading.max_tasks": "0",
    "data.grading.response_tail": "0",
    "data.grading.alarm_fraction": "2",
    "data.evaluate_before": "1",
    "data.evaluate_after": "1",
    "data.eval_interval": "-1",
    # rollouts
    "rollout.backend": "vllm",
    "rollout.prompts_per_step": "60",
    "rollout.responses_per_prompt": "1",
    "rollout.temperature": "0",
    "rollout.top_k": "50",
    "rollout.top_p": "0.9",
    "rollout.repetition_penalty": "1.1",
    "rollout.check.interval": "-1",
    "rollout.check.warn_gap": "0",
    "rollout.check.stop_gap": "-0.1",
    "rollout.check.warn_error": "0",
    "rollout.check.stop_error": "inf",
    "rollout.correction.token_weight": "product",
    "rollout.correction.truncation": "0",
    "rollout.correction.icepop_low": "0",
    "rollout.correction.icepop_high": "nan",
    "rollout.correction.response_gap_limit": "0",
    "rollout.server.urls": "[localhost]",
    "rollout.server.engine": "sglang",
    "rollout.server.handover_folder": "[a]",
    "rollout.server.restart_command": "[a]",
    "rollout.server.sleep": "1",
    "rollout.server.requests_at_once": "0",
    "rollout.server.attempts": "0",
    "rollout.server.backoff": "0",
    "rollout.server.request_time_limit": "0",
    "rollout.server.time_limit": "inf",
    "rollout.server.load_time_limit": "-1",
    "rollout.trtllm.unload": "1",
    "rollout.trtllm.engine_folder": "[a]",
    "rollout.trtllm.time_limit": "0",
    "rollout.max_response_length": "10240",
    "rollout.batch_size": "0",
    "rollout.server": "http://127.0.0.1:8000",
    # training
    "trainer.max_steps": "0",
    "trainer.updates_per_rollout": "7",
    "trainer.micro_batch_tokens": "0",
    "trainer.micro_batch_size": "0",
    "trainer.sequence_packing": "sometimes",
    "trainer.fused_output_layer": "1",
    "trainer.warmup_steps": "-1",
    "trainer.save_interval": "0.5",
    "trainer.keep_last": "0",
    "trainer.keep_best": "-1",
    "trainer.async_save": "1",
    "trainer.max_time": "60",
    "trainer.log_samples": "-1",
    "trainer.max_bad_updates": "0",
    "trainer.spike_factor": "1",
    "trainer.spike_window": "8",
    "trainer.spike_rewinds": "-1",
    "trainer.dump_rollouts": "-1",
    "trainer.trackers": "[sheets]",
    "trainer.collective_timeout": "0",
    "trainer.optimizer.name": "adam",
    "trainer.optimizer.learning_rate": "0",
    "trainer.optimizer.betas": "[0.9]",
    "trainer.optimizer.eps": "0",
    "trainer.optimizer.weight_decay": "-0.1",
    "trainer.optimizer.gradient_clip": "-1",
    # hardware
    "hardware.accelerator": "tpu",
    "hardware.nodes": "0",
    "hardware.devices_per_node": "6",
    "hardware.device_memory_gib": "0",
    "hardware.device_tflops": "fast",
    "hardware.device_bandwidth_gb_s": "-1",
}


def refusal(overrides: list[str], saved: Path) -> str:
    with pytest.raises(UserError) as error:
        load_config(overrides, saved)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("field", BREAKS)
def test_a_broken_field_is_named(field, saved):
    assert field in refusal([f"{field}={BREAKS[field]}"], saved)


def test_a_field_of_a_list_is_named(saved):
    for field, value in {
        "name": "''", "path": "/nowhere", "samples": "0", "temperature": "-1", "k": "[64]", "answer_form": "x"
    }.items():  # fmt: skip
        entry = {"name": "a", "path": "math/amc.jsonl", "samples": "32"} | {field: value}
        text = ",".join(f"{key}:{each}" for key, each in entry.items())
        text = text.replace("path:math", f"path:{saved.parent}/math")
        assert f"data.evaluation.0.{field}" in refusal([f"data.evaluation=[{{{text}}}]"], saved)


def test_a_missing_field_is_named(saved):
    required = ["model.name", "algorithm.name", "data.train", "rollout.backend", "hardware.accelerator"]
    for field in [*required, "algorithm.clip_low", "algorithm.advantage"]:
        assert refusal([f"~{field}"], saved).startswith(f"{field}: is missing")


def leaves(kind, prefix):
    """The names of all fields of a section, those of its own sections among them."""
    for name, field in kind.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_the_table_has_all_fields():
    fields = {name for name in leaves(Config, "") if "." in name}
    assert fields - BREAKS.keys() == set()
    assert len(BREAKS) >= 60
