"""Each mistake is refused in one line that names the key, its value and what to do."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from support.toy_files import make_toy_files

from tepo_nemo.config.load import dump_config, load_config
from tepo_nemo.config.presets import choices
from tepo_nemo.config.schema import Config
from tepo_nemo.errors import UserError


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default configuration, composed once and saved: the checks are the same as on presets."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_toy_files(folder)
        (folder / "config.yaml").write_text(dump_config(load_config()))
    return folder / "config.yaml"


SAMPLER = "since the log-probabilities of the trainer would not be those of the sampler"

MISTAKES = [
    # unknown names, with the nearest
    (
        "rollout.prompt_per_step=3",
        "rollout.prompt_per_step: unknown key (did you mean rollout.prompts_per_step?)",
    ),
    ("trainer.optimiser.eps=1", "trainer.optimiser: unknown key (did you mean trainer.optimizer?)"),
    ("temperature=1", "temperature: unknown key (did you mean rollout.temperature?)"),
    ("modle=toy", "modle: unknown key (did you mean model?)"),
    (
        "hardware.zzz=1",
        "hardware.zzz: unknown key (the keys here are accelerator, nodes, devices_per_node, "
        "device_memory_gib, device_tflops, device_bandwidth_gb_s)",
    ),
    (
        "data.evaluation=[{name:a,pth:toy/test.jsonl}]",
        "data.evaluation.0.pth: unknown key (did you mean data.evaluation.0.path?)",
    ),
    (
        "model=tyo",
        "model=tyo: unknown model; did you mean toy? choose from " + ", ".join(choices()["model"]),
    ),
    (
        "algorithm=tpo",
        "algorithm=tpo: unknown algorithm; did you mean tepo? choose from "
        + ", ".join(choices()["algorithm"]),
    ),
    (
        "experiment=toy",
        "experiment=toy: unknown experiment; did you mean toy_cpu? choose from "
        + ", ".join(choices()["experiment"]),
    ),
    (
        "~model",
        "~model: presets are only chosen, as model=NAME; choose from " + ", ".join(choices()["model"]),
    ),
    ("algorithm.clip_lo=0.1", "algorithm.clip_lo: is no option of tepo (did you mean algorithm.clip_low?)"),
    (
        "~algorithm.clip_low",
        "algorithm.clip_low: is missing (set algorithm.clip_low=..., or start from a preset of algorithm=)",
    ),
    (
        "model.num_layer=2",
        "model.num_layer: unknown key (did you mean model.num_layers? a key that only NeMo knows goes under "
        "model.extra)",
    ),
    (
        "model.layernorm_epsilom=1e-5",
        "model.layernorm_epsilom: unknown key (did you mean model.layernorm_epsilon? a key that only NeMo "
        "knows goes "
        "under model.extra)",
    ),
    ("model.zzz=3", "model.zzz: unknown key (a key that only NeMo knows goes under model.extra)"),
    (
        "model.extra.hidden_size=3",
        "model.extra.hidden_size=3: is a known key (set model.hidden_size instead)",
    ),
    (
        "model.extra.layernorm_epsilon=1e-5",
        "model.extra.layernorm_epsilon=1e-05: is a known key (set model.layernorm_epsilon instead)",
    ),
    ("~data.train", "data.train: is missing (set data.train=...)"),
    ("~trainer.zzz", "~trainer.zzz: there is no such key to remove (remove the override)"),
    ("~zzz.zzz", "~zzz.zzz: there is no such key to remove (remove the override)"),
    # said in another place
    (
        "model.micro_batch_size=2",
        "model.micro_batch_size=2: follows from another key (set trainer.micro_batch_size instead)",
    ),
    ("model.bf16=true", "model.bf16=true: follows from another key (set model.precision instead)"),
    (
        "model.calculate_per_token_loss=true",
        "model.calculate_per_token_loss=true: is decided by the training code (remove the key)",
    ),
    # types and ranges
    ("trainer.max_steps=many", "trainer.max_steps=many: must be a whole number"),
    ("trainer.max_steps=1.5", "trainer.max_steps=1.5: must be a whole number"),
    ("trainer.max_steps=true", "trainer.max_steps=true: must be a whole number"),
    ("trainer.max_steps=null", "trainer.max_steps=null: must be a whole number"),
    ("trainer.max_steps=0", "trainer.max_steps=0: must be at least 1"),
    ("trainer.micro_batch_size=0", "trainer.micro_batch_size=0: must be at least 1"),
    ("trainer.micro_batch_size=-2", "trainer.micro_batch_size=-2: must be at least 1"),
    (
        "trainer.sequence_packing=true",
        "trainer.sequence_packing=true: needs the attention of Transformer Engine, which "
        "hardware.accelerator=cpu does without (set trainer.sequence_packing=false)",
    ),
    (
        "trainer.sequence_packing=true hardware.accelerator=gpu model.transformer_engine=false",
        "trainer.sequence_packing=true: needs the attention of Transformer Engine, which "
        "model.transformer_engine=false does without (set trainer.sequence_packing=false)",
    ),
    ("trainer.micro_batch_tokens=0", "trainer.micro_batch_tokens=0: must be at least 1"),
    ("trainer.updates_per_rollout=0", "trainer.updates_per_rollout=0: must be at least 1"),
    *(
        (
            f"trainer.max_time={value}",
            f"trainer.max_time={value}: must be a time as SLURM writes it (HH:MM:SS or D-HH:MM:SS, in a YAML "
            "file in quotes)",
        )
        for value in ("90", "1:75:00", "00:00:00", "2-5", "soon")
    ),
    ("trainer.keep_last=0", "trainer.keep_last=0: must be at least 1"),
    (
        "trainer.spike_window=8",
        "trainer.spike_window=8: has no effect with trainer.spike_factor=null (set that too)",
    ),
    (
        "trainer.spike_rewinds=1 trainer.spike_factor=5",
        "trainer.spike_rewinds=1: has no effect with trainer.save_interval=0, since there is nothing to go "
        "back to (set that too)",
    ),
    (
        "trainer.spike_rewinds=1 trainer.spike_factor=5 trainer.save_interval=1 replay=.",
        "trainer.spike_rewinds=1: has no effect with replay, which has the same prompts again (remove it)",
    ),
    (
        "replay=/nowhere",
        "replay=/nowhere: no such folder (give one of rollouts/ or bad_updates/ of a run, or rollouts/)",
    ),
    (
        "trainer.keep_best=1",
        "trainer.keep_best=1: has no effect with trainer.save_interval=0 (set that too)",
    ),
    (
        "trainer.keep_best=1 trainer.save_interval=5 data.eval_interval=2",
        "trainer.save_interval=5: must be a multiple of data.eval_interval=2 with trainer.keep_best, which "
        "compares evaluations",
    ),
    ("trainer.save_interval=-1", "trainer.save_interval=-1: must be at least 0"),
    ("hardware.devices_per_node=0", "hardware.devices_per_node=0: must be at least 1"),
    ("rollout.batch_size=0", "rollout.batch_size=0: must be at least 1"),
    ("rollout.temperature=0", "rollout.temperature=0: must be greater than 0"),
    ("rollout.temperature=-1.0", "rollout.temperature=-1.0: must be greater than 0"),
    ("rollout.temperature=nan", "rollout.temperature=nan: must be a finite number"),
    ("rollout.temperature=inf", "rollout.temperature=inf: must be a finite number"),
    ("trainer.optimizer.learning_rate=0", "trainer.optimizer.learning_rate=0: must be greater than 0"),
    ("trainer.optimizer.learning_rate='1e-4'", "trainer.optimizer.learning_rate=1e-4: must be a number"),
    ("trainer.optimizer.gradient_clip=-1", "trainer.optimizer.gradient_clip=-1: must be at least 0"),
    ("trainer.optimizer.betas=[0.9,1.0]", "trainer.optimizer.betas.1=1.0: must be less than 1"),
    ("trainer.optimizer.betas=[0.9]", "trainer.optimizer.betas=[0.9]: has too few values"),
    ("trainer.optimizer.betas=0.9", "trainer.optimizer.betas=0.9: must be a list"),
    (
        "trainer.optimizer.name=adamw",
        "trainer.optimizer.name=adamw: must be one of adam, sgd, distributed_adam",
    ),
    ("hardware.accelerator=tpu", "hardware.accelerator=tpu: must be one of cpu, gpu"),
    ("algorithm.dynamic_sampling=1", "algorithm.dynamic_sampling=1: must be true or false"),
    (
        "algorithm.advantage=grp",
        "algorithm.advantage=grp: must be one of group, mean, rloo, gpg, gpg_nonzero",
    ),
    ("data.reward=3", "data.reward=3: must be a name, or a list of parts (name, weight, options)"),
    ("data.reward=[]", "data.reward=[]: list should have at least 1 item after validation, not 0"),
    ("data.reward=[{nam:boxed}]", "data.reward.0.nam: unknown key (did you mean data.reward.0.name?)"),
    ("data.reward=[{name:boxed,weight:much}]", "data.reward.0.weight=much: must be a number"),
    ("data.grading.workers=0", "data.grading.workers=0: must be at least 1"),
    ("data.grading.time_limit=0", "data.grading.time_limit=0: must be greater than 0"),
    ("data.grading.alarm_fraction=2", "data.grading.alarm_fraction=2: must be at most 1"),
    ("data.train=3", "data.train=3: must be a path"),
    ("data.evaluation=x", "data.evaluation=x: must be a list"),
    ("trainer=3", "trainer=3: must be a section of keys, not a single value"),
    ("model.precision=64", "model.precision=64: must be one of 32, bf16"),
    # overrides that are none
    ("seed=1,2", "seed=1,2: gives several values; write a list as seed=[A,B], or give one value"),
    ("hydra.run.dir=x", "hydra.run.dir=x: Hydra's own settings have no effect here (remove the override)"),
    (
        "=3",
        "=3: is no override (it names no key); write KEY=VALUE, and quote values with special characters: "
        "'KEY=\"VALUE\"'",
    ),
    (
        "seed",
        "seed: is no override (missing EQUAL at '<EOF>'); write KEY=VALUE, and quote values with special "
        "characters: "
        "'KEY=\"VALUE\"'",
    ),
    ("seed=${nobody}", "seed: cannot be resolved (Interpolation key 'nobody' not found)"),
    # groups (faults 3)
    *(
        (
            f"rollout.responses_per_prompt={size}",
            f"rollout.responses_per_prompt={size}: must be at least 2, since a group of one has no baseline "
            "(set rollout.responses_per_prompt=8)",
        )
        for size in (1, 0, -8)
    ),
    # samplers other than the policy (faults 17)
    (
        "rollout.top_k=50",
        f"rollout.top_k=50: is refused in training rollouts, {SAMPLER} (leave rollout.top_k=0)",
    ),
    (
        "rollout.top_p=0.9",
        f"rollout.top_p=0.9: is refused in training rollouts, {SAMPLER} (leave rollout.top_p=1.0)",
    ),
    (
        "rollout.repetition_penalty=1.1",
        f"rollout.repetition_penalty=1.1: is refused in training rollouts, {SAMPLER} (leave "
        "rollout.repetition_penalty=1.0)",
    ),
    # what is not built
    (
        "model.context_parallel_size=2",
        "model.context_parallel_size=2: needs context parallelism, which is not supported (remove the key)",
    ),
    (
        "model.virtual_pipeline_model_parallel_size=2",
        "model.virtual_pipeline_model_parallel_size=2: needs a virtual pipeline, which is not supported "
        "(remove the key)",
    ),
    (
        "model.num_moe_experts=8",
        "model.num_moe_experts=8: needs a mixture of experts, which is not supported (remove the key)",
    ),
    (
        "model.num_moe_experts=1",
        "model.num_moe_experts=1: needs a mixture of experts, which is not supported (remove the key)",
    ),
    (
        "model.expert_model_parallel_size=2",
        "model.expert_model_parallel_size=2: needs a mixture of experts, which is not supported (remove the "
        "key)",
    ),
    (
        "model.peft.peft_scheme=lora",
        "model.peft={'peft_scheme': 'lora'}: needs LoRA or another adapter, which is not supported (remove "
        "the key)",
    ),
    (
        "model.lora_rank=8",
        "model.lora_rank=8: needs LoRA or another adapter, which is not supported (remove the key)",
    ),
    ("model.fp8=true", "model.fp8=true: needs fp8, which is not supported (remove the key)"),
    ("model.fsdp=true", "model.fsdp=true: needs FSDP, which is not supported (remove the key)"),
    (
        "model.num_layers_in_first_pipeline_stage=1",
        "model.num_layers_in_first_pipeline_stage=1: needs uneven pipeline stages, which is not supported "
        "(remove the key)",
    ),
    (
        "model.extra.context_parallel_size=2",
        "model.context_parallel_size=2: needs context parallelism, which is not supported (remove the key)",
    ),
    *(
        (
            f"model.{key}=0.1",
            f"model.{key}=0.1: must be 0, since with dropout no log-probability can be computed twice",
        )
        for key in ("hidden_dropout", "attention_dropout", "ffn_dropout")
    ),
    *(
        (
            f"model.precision={value}",
            f"model.precision={value}: 16-bit floats are not supported, their range needs a loss scale "
            "(set model.precision=bf16)",
        )
        for value in ("16", "fp16", "16-mixed")
    ),
    (
        "model.megatron_amp_O2=true",
        "model.megatron_amp_O2=true: needs 16-bit weights, and model.precision=32 (set model.precision=bf16 "
        "or remove it)",
    ),
    (
        "model.precision=bf16 model.megatron_amp_O2=true",
        "trainer.optimizer.name=adam: keeps no fp32 copies of the bf16 weights that "
        "model.megatron_amp_O2=true asks for (set trainer.optimizer.name=distributed_adam)",
    ),
    (
        "model.precision=bf16 model.sequence_parallel=true model.tensor_model_parallel_size=2 "
        "hardware.devices_per_node=2",
        "model.sequence_parallel=true: Megatron's own layers, which the CPU has, cannot be autocast to "
        "model.precision=bf16 with it (set model.megatron_amp_O2=true and "
        "trainer.optimizer.name=distributed_adam, or model.sequence_parallel=false)",
    ),
    # what does not fit together
    (
        "trainer.updates_per_rollout=7",
        "trainer.updates_per_rollout=7: must divide rollout.prompts_per_step=64, so that an update trains on "
        "whole groups; "
        "set it to 4 or 8",
    ),
    (
        "hardware.devices_per_node=65",
        "trainer.updates_per_rollout=8: leaves 64 responses an update (512 / 8) for 65 copies of the model "
        "(65 ranks / 1); make rollout.prompts_per_step=64 x rollout.responses_per_prompt=8 at least 520",
    ),
    (
        "model.tensor_model_parallel_size=2",
        "hardware.nodes=1 x hardware.devices_per_node=1: the number of ranks, 1, is no multiple of the 2 "
        "that hold a copy "
        "of the model (model.tensor_model_parallel_size=2 x model.pipeline_model_parallel_size=1); make the "
        "ranks a "
        "multiple of 2",
    ),
    (
        "model.tensor_model_parallel_size=3 hardware.devices_per_node=3",
        "model.tensor_model_parallel_size=3: must divide model.num_attention_heads=4 (set a size that does)",
    ),
    (
        "model.tensor_model_parallel_size=4 hardware.devices_per_node=4 model.num_query_groups=2",
        "model.tensor_model_parallel_size=4: must divide model.num_query_groups=2 (set a size that does)",
    ),
    (
        "model.tensor_model_parallel_size=4 hardware.devices_per_node=4 model.ffn_hidden_size=510",
        "model.tensor_model_parallel_size=4: must divide model.ffn_hidden_size=510 (set a size that does)",
    ),
    (
        "model.tensor_model_parallel_size=4 hardware.devices_per_node=4 model.hidden_size=130 "
        "model.kv_channels=32",
        "model.tensor_model_parallel_size=4: must divide model.hidden_size=130 (set a size that does)",
    ),
    (
        "model.hidden_size=130",
        "model.hidden_size=130: must be a multiple of model.num_attention_heads=4 (or set model.kv_channels)",
    ),
    (
        "model.hidden_size=132",
        "model.kv_channels=null: heads of width 33 cannot be rotated, which "
        "model.position_embedding_type=rope does with channels in pairs (set an even width)",
    ),
    (
        "model.max_position_embeddings=63",
        "model.encoder_seq_length=64: is longer than model.max_position_embeddings=63, the longest sequence "
        "that the model was made for (set at most 63)",
    ),
    (
        "model.tensor_model_parallel_size=4 hardware.nodes=2 hardware.devices_per_node=2",
        "model.tensor_model_parallel_size=4: must divide hardware.devices_per_node=2, so that ranks which "
        "share a layer are on one node (they exchange activations twice a layer; set a size that does, and "
        "model.pipeline_model_parallel_size for the rest)",
    ),
    (
        "model.pipeline_model_parallel_size=2 hardware.devices_per_node=80",
        "model.pipeline_model_parallel_size=2: an update has 64 responses for 40 copies of the model, at "
        "most 1 micro-batches each, so that stages would always wait (set at most 1, or lower "
        "trainer.updates_per_rollout)",
    ),
    ("algorithm.clip_low=-0.1", "algorithm.clip_low=-0.1: must be at least 0"),
    ("algorithm.kl_estimator=k4", "algorithm.kl_estimator=k4: must be one of k1, k2, k3, abs"),
    ("model.num_query_groups=3", "model.num_query_groups=3: must divide model.num_attention_heads=4"),
    (
        "model.pipeline_model_parallel_size=4 hardware.devices_per_node=4",
        "model.pipeline_model_parallel_size=4: is more stages than model.num_layers=2 (set at most 2)",
    ),
    (
        "model.pipeline_model_parallel_size=2 hardware.devices_per_node=2 model.num_layers=3",
        "model.pipeline_model_parallel_size=2: must divide model.num_layers=3 (set a size that does)",
    ),
    (
        "model.sequence_parallel=true",
        "model.sequence_parallel=true: has no effect with model.tensor_model_parallel_size=1 (remove it or "
        "set a larger "
        "size)",
    ),
    (
        "model.sequence_parallel=true model.tensor_model_parallel_size=2 hardware.devices_per_node=2 "
        "model.encoder_seq_length=63",
        "model.encoder_seq_length=63: must be a multiple of model.tensor_model_parallel_size=2 with "
        "model.sequence_parallel=true",
    ),
    *(
        (
            f"rollout.max_response_length={length}",
            f"rollout.max_response_length={length}: leaves no room for a prompt in "
            "model.encoder_seq_length=64 (shorten "
            "the one or lengthen the other)",
        )
        for length in (64, 8192)
    ),
    (
        "trainer.optimizer.name=sgd trainer.optimizer.eps=1e-6",
        "trainer.optimizer.eps=1e-06: has no effect with trainer.optimizer.name=sgd (remove it)",
    ),
    (
        "data.eval_interval=2 data.evaluation=[]",
        "data.eval_interval=2: there is nothing to evaluate (set data.evaluation)",
    ),
    (
        "data.evaluation=[{name:a,path:toy/test.jsonl},{name:a,path:toy/test.jsonl}]",
        "data.evaluation.1.name=a: is taken already (give each benchmark its own name)",
    ),
    *(
        (
            f"model.{key}=null",
            f"model.{key}: is missing, and there is no checkpoint to take it from (set model.{key} or "
            "model.restore_from_path)",
        )
        for key in (
            "tokenizer",
            "vocab_size",
            "num_layers",
            "encoder_seq_length",
            "share_embeddings_and_output_weights",
        )
    ),
    # files
    (
        "model.restore_from_path=/nowhere/start.nemo",
        "model.restore_from_path=/nowhere/start.nemo: no such checkpoint (make it with tepo-nemo convert, or "
        "correct the path)",
    ),
    (
        "model.tokenizer.type=/nowhere/tokenizer",
        "model.tokenizer.type=/nowhere/tokenizer: no such folder (correct the path)",
    ),
    (
        "data.train=/nowhere/train.jsonl",
        "data.train=/nowhere/train.jsonl: no such file (make it with tepo-nemo prepare-data, or correct the "
        "path)",
    ),
    ("data.train=/", "data.train=/: no such file (make it with tepo-nemo prepare-data, or correct the path)"),
    (
        "data.evaluation=[{name:a,path:/nowhere/a.jsonl}]",
        "data.evaluation.0.path=/nowhere/a.jsonl: no such file (make it with tepo-nemo prepare-data, or "
        "correct the path)",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES, ids=[overrides for overrides, _ in MISTAKES])
def test_mistake_is_refused_with_its_line(overrides, message, toy):
    with pytest.raises(UserError) as refusal:
        load_config(overrides.split(" "), toy)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "overrides",
    [
        "rollout.responses_per_prompt=2 trainer.micro_batch_size=5",
        "hardware.devices_per_node=3",
        "trainer.micro_batch_tokens=null",
        "trainer.sequence_packing=true hardware.accelerator=gpu",
        "rollout.top_k=0 rollout.top_p=1.0 rollout.repetition_penalty=1.0",
        "model.context_parallel_size=1",
        "model.virtual_pipeline_model_parallel_size=null model.num_moe_experts=null "
        "model.expert_model_parallel_size=1",
        "model.peft.peft_scheme=none",
        "model.hidden_dropout=0",
        "model.precision=bf16 model.megatron_amp_O2=true trainer.optimizer.name=distributed_adam",
        "model.precision=bf16",
        "model.precision='32'",
        "model.layernorm_epsilon=1e-5 model.max_position_embeddings=64",
        "model.extra.my_key=3",
        "model.hidden_size=136 model.num_query_groups=null",
        "model.kv_channels=16",
        "model.pipeline_model_parallel_size=2 hardware.devices_per_node=2",
        "model.sequence_parallel=true model.tensor_model_parallel_size=4 hardware.devices_per_node=4",
        "rollout.max_response_length=63",
        "trainer.micro_batch_size=64",
        "trainer.optimizer.name=sgd trainer.optimizer.gradient_clip=0",
        "data.evaluation=[]",
        "model.tokenizer.type=Qwen/Qwen2.5-7B",
        "algorithm.name=my_package.MyObjective ~algorithm.kl_mask",
    ],
)
def test_the_nearest_right_value_is_taken(overrides, toy):
    load_config(overrides.split(" "), toy)


def test_presets_are_checked_like_a_saved_configuration():
    with pytest.raises(UserError, match="^rollout.responses_per_prompt=1: must be at least 2"):
        load_config(["experiment=toy_cpu", "rollout.responses_per_prompt=1"])
    load_config(["experiment=null"])


def typed_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from typed_keys(field.annotation, f"{prefix}{name}.")


@pytest.mark.parametrize("key", [key for key in typed_keys(Config) if key != "seed"])
def test_every_key_is_suggested_for_its_misspelling(key, toy):
    with pytest.raises(UserError) as refusal:
        load_config([f"{key}{key[-1]}=1"], toy)
    assert f"did you mean {key}?" in str(refusal.value)


def test_a_misspelling_comes_before_the_key_that_it_leaves_missing(toy):
    with pytest.raises(UserError, match=r"^data\.trian: unknown key \(did you mean data\.train\?\)$"):
        load_config(["~data.train", "data.trian=toy/train.jsonl"], toy)


def test_a_long_or_broken_value_stays_one_short_line(toy):
    value = "long words\n" * 500
    with pytest.raises(UserError) as refusal:
        load_config([f'trainer.max_steps="{value}"'], toy)
    message = str(refusal.value)
    assert "\n" not in message and len(message) < 200
    assert message.startswith("trainer.max_steps=long words long words")
    assert message.endswith("...: must be a whole number")
