"""Training with a faked TensorRT-LLM, and single calls of its backend with a fault. Run in all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.backend_contract import SAMPLED, build_with_backend
from support.fake_trtllm import Faults
from support.tiny_run import Recording
from support.toy import CHARACTERS, ToyFolder, build_objective

from tepo_nemo.config.schema import Config
from tepo_nemo.reward.result import RewardResult, in_process

PROMPTS = ["1+1=", "12-3=", "7=", "40+5=", "9-9=", "123="]


@in_process
def holds_a_seven(prompt: str, response_text: str, gold: str, metadata: dict) -> RewardResult:
    """What a policy of random weights gets now and then, and learns in a few steps."""
    return RewardResult(float("7" in response_text), "ok")


def make_even_toy(rank: int, world_size: int, path: Path) -> ToyFolder:
    """The toy with one character more, so that two ranks can share its 18 tokens."""
    from tepo_nemo.data.char_tokenizer import make_char_tokenizer

    make_char_tokenizer(path / "tokenizer", CHARACTERS + "*")
    rows = [f'{{"id": "{n}", "prompt": "{prompt}", "gold": "7"}}\n' for n, prompt in enumerate(PROMPTS)]
    (path / "train.jsonl").write_text("".join(rows))
    return ToyFolder(path)


@dataclass(frozen=True)
class Planted:
    """A run with a fault."""

    faults: dict[str, Any] = field(default_factory=dict)
    # Build the engine before the run, and then give the model other weights, as a checkpoint would.
    weights_before: bool = False


@dataclass(frozen=True)
class Trained:
    """What came out on one rank: metrics of the steps, and what ended the run."""

    metrics: list[dict[str, float]]
    error: str | None


def train(rank: int, world_size: int, config: Config, runs: Mapping[str, Planted]) -> dict[str, Trained]:
    """One run after the other, each from the weights of the configuration's seed."""
    found = {}
    for name, planted in runs.items():
        host, policy = build_with_backend(config, Faults(**planted.faults))
        disturb(host.actor, seed=1)
        if planted.weights_before:
            policy.prepare_for_inference()
            policy.finish_inference()
            disturb(host.actor, seed=2, size=0.3)
        recording = Recording()
        error = None
        try:
            make_trainer_of(config, host, policy, recording).fit()
        except RuntimeError as caught:
            error = str(caught)
        found[name] = Trained(recording.metrics, error)
        forget_engine(config)
    return found


class NothingSaved:
    """A saver of a run that nobody goes on with."""

    failed = 0

    def save(self, *_: Any, **__: Any) -> bool:
        return True

    def poll(self) -> None:
        """Nothing is on its way."""


def make_trainer_of(config: Config, host, policy, recording: Recording):
    """The trainer of a run, which saves nothing."""
    from tepo_nemo.nemo.run import load_training_set, make_grader, make_trainer

    grader = make_grader(config, policy, host.actor.tokenizer.ids_to_text)
    objective = build_objective(config.algorithm)
    prompts = load_training_set(config, host)
    return make_trainer(
        config,
        policy,
        objective,
        grader,
        prompts,
        dict,
        recording,
        NothingSaved(),
        check_stop=lambda: None,
        go_back=lambda: None,
        replay=None,
    )


def disturb(model, seed: int, size: float = 0.2) -> None:
    """Norms are not 1 and biases not 0 afterwards, or (with a bias for each row) nothing is what it was.

    The same on ranks that hold the same, and different on those that share something.
    """
    from megatron.core import parallel_state

    place = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for chunk in model.get_model_module_list():
            for name, parameter in chunk.named_parameters():
                if parameter.dim() == 1 or size > 0.2:
                    shared = parameter.dim() > 1 or name.endswith("linear_qkv.bias")
                    random = torch.Generator().manual_seed(1000 * seed + len(name) + (place if shared else 0))
                    noise = torch.randn(parameter.shape, generator=random)
                    parameter.add_((size if parameter.dim() == 1 else 0.3 * size) * noise)


def forget_engine(config: Config) -> None:
    """A process has one engine: the next run must not find that of this one."""
    if config.rollout.backend == "trtllm":
        from nemo.export.trt_llm import tensorrt_llm_run

        tensorrt_llm_run.tensorrt_llm_worker_context.decoder = None


@dataclass(frozen=True)
class Call:
    """Faults of a call: of one that generates, or of a second one that refits."""

    faults: dict[str, Any]
    refits: bool = False


def call_with_faults(rank: int, world_size: int, config: Config, calls: Mapping[str, Call]) -> dict[str, str]:
    """What each call raised, with its notes; "fine" where it did not. One engine for all."""
    faults = Faults()
    host, policy = build_with_backend(config, faults)
    policy.prepare_for_inference()
    messages = {}
    for name, call in calls.items():
        for key, value in call.faults.items():
            setattr(faults, key, value)
        try:
            if call.refits:
                host.actor.rollout.prepare()
            messages[name] = "fine" if bool((policy.infer(SAMPLED).lengths > 0).all()) else "left out"
        except Exception as error:
            messages[name] = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        vars(faults).update(vars(Faults()))
    return messages


def build_with_faults(
    rank: int, world_size: int, config: Config, cases: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What building an engine raised with each set of faults."""
    messages = []
    for case in cases:
        try:
            _, policy = build_with_backend(config, Faults(**case))
            policy.prepare_for_inference()
            messages.append("fine")
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
        forget_engine(config)
    return messages


def lose_biases(rank: int, world_size: int, config: Config) -> str:
    """What comes of an exporter that is left as it is, for a model with biases."""
    from contextlib import nullcontext
    from unittest.mock import patch

    _, policy = build_with_backend(config)
    from tepo_nemo.nemo.rollout.trtllm import engine

    with patch.object(engine, "engine_class_of", lambda model: nullcontext()):
        try:
            policy.prepare_for_inference()
        except RuntimeError as error:
            return str(error)
    return "fine"


def hang(rank: int, world_size: int, config: Config) -> None:
    """A batch that never comes back."""
    _, policy = build_with_backend(config, Faults(hang=True))
    policy.prepare_for_inference()
    policy.infer(SAMPLED)


def engine_config(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """The configuration that NeMo's exporter would hand to TensorRT-LLM for a model of this size, unbuilt."""
    from types import SimpleNamespace

    from megatron.core.export.data_type import DataType
    from megatron.core.export.export_config import ExportConfig
    from megatron.core.export.model_type import ModelType
    from support.fake_trtllm import seat

    from tepo_nemo.nemo.host_config import host_config

    seat()
    from megatron.core.export.trtllm import trtllm_helper
    from nemo.export.tensorrt_llm import TensorRTLLM

    from tepo_nemo.nemo.rollout.trtllm.architecture import MODEL_TYPE, engine_class_of, exported_config

    cfg = host_config(config).model
    layers = SimpleNamespace(
        **{
            name: cfg[name]
            for name in (
                "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
                "kv_channels", "layernorm_epsilon",
            )
        },
        add_bias_linear=cfg.bias,
        add_qkv_bias=cfg.qkv_bias,
    )  # fmt: skip
    model = SimpleNamespace(cfg=cfg, transformer_config=layers)
    exported = exported_config(model)
    ranks = config.model.tensor_model_parallel_size
    with engine_class_of(model):
        helper = trtllm_helper.TRTLLMHelper(
            transformer_config=TensorRTLLM("unused", load_model=False).get_transformer_config(exported),
            model_type=ModelType[MODEL_TYPE],
            **{
                name: exported[name]
                for name in (
                    "position_embedding_type", "max_position_embeddings", "rotary_percentage", "rotary_base",
                    "activation", "share_embeddings_and_output_weights",
                )
            },
        )  # fmt: skip
        found = helper._get_trtllm_config(
            export_config=ExportConfig(inference_tp_size=ranks, use_parallel_embedding=True),
            world_size=ranks,
            gpus_per_node=8,
            vocab_size_padded=config.model.vocab_size,
            dtype=DataType.bfloat16,
        )
    return found.to_dict()
