"""What the installed NeMo and TensorRT-LLM can do, looked up instead of believed from their versions."""

import importlib
import inspect
import os
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType

from tepo_nemo.errors import UserError

_BUILD = (
    "model", "model_config", "model_type", "gpus_per_node", "tokenizer", "max_input_len", "max_output_len",
    "max_batch_size", "use_refit", "reshard_model", "use_mcore_path",
)  # fmt: skip
_SAMPLING = (
    "end_id", "pad_id", "max_new_tokens", "output_sequence_lengths", "return_dict", "stop_words_list",
    "temperature", "top_k", "top_p", "min_length", "random_seed", "output_log_probs",
)  # fmt: skip
_WANTED = "NeMo 2.2 and TensorRT-LLM 0.16 or 0.17, as nemo:25.02 has them"


def import_exporter() -> ModuleType:
    """`nemo.export.tensorrt_llm`, with the setting that its runtime needs in these processes.

    Raises:
        UserError: NeMo or TensorRT-LLM cannot be imported.
    """
    # TensorRT-LLM would take the device with the number of the rank inside its own group.
    os.environ["DISABLE_TORCH_DEVICE_SET"] = "1"
    try:
        return importlib.import_module("nemo.export.tensorrt_llm")
    except ImportError as error:
        raise UserError(
            f"rollout.backend=trtllm: {error} (start from a NeMo container that has TensorRT-LLM, or set "
            "rollout=megatron)"
        ) from error


def check_signatures(exporter: ModuleType) -> None:
    """Refuse packages that do not fit together before an engine is built, which takes minutes.

    Raises:
        UserError: names what is missing.
    """
    runtime = importlib.import_module("tensorrt_llm.runtime")
    run = importlib.import_module("nemo.export.trt_llm.tensorrt_llm_run")
    helper = importlib.import_module("megatron.core.export.trtllm.trtllm_helper")
    missing = [
        *_missing("TensorRTLLM.build", _parameters(exporter.TensorRTLLM.build), _BUILD),
        *_missing("TensorRTLLM.refit", _parameters(exporter.TensorRTLLM.refit), ("model", "model_config")),
        *_missing("TensorRTLLM", dir(exporter.TensorRTLLM), ("unload_engine",)),
        *_missing("nemo.export.tensorrt_llm", vars(exporter), ("refit",)),
        *_missing("TRTLLMHelper", dir(helper.TRTLLMHelper), ("_get_trtllm_config",)),
        *_missing(
            "ModelRunner.from_engine",
            _parameters(runtime.ModelRunner.from_engine),
            _passed_on(run.load_distributed),
        ),
        *_missing("SamplingConfig", getattr(runtime.SamplingConfig, "__dataclass_fields__", ()), _SAMPLING),
        *_missing("SamplingConfig", dir(runtime.SamplingConfig), ("update",)),
    ]
    if missing:
        raise UserError(
            f"rollout.backend=trtllm: the installed packages do not fit together, {', '.join(missing)} is "
            f"missing (use {_WANTED}, or set rollout=megatron)"
        )


def _missing(owner: str, present: Iterable[str], needed: Iterable[str]) -> list[str]:
    present = set(present)
    return [f"{owner}({name})" for name in needed if name not in present]


def _parameters(function: Callable) -> Iterable[str]:
    return inspect.signature(function).parameters


def _passed_on(load: Callable) -> list[str]:
    """The keyword arguments that NeMo's loader hands to the runtime: some releases lack the last of them."""
    arguments = (
        "max_output_len", "lora_dir", "debug_mode", "lora_ckpt_source", "medusa_choices", "stream",
        "gpu_weights_percent", "enable_context_fmha_fp32_acc", "multi_block_mode",
    )  # fmt: skip
    constants = set(_constants(load.__code__))
    return [name for name in arguments if name in constants]


def _constants(code: CodeType) -> Iterable[object]:
    """Of a function, with those of its tuples: a dictionary display keeps its keys in one."""
    for constant in code.co_consts:
        yield from constant if isinstance(constant, tuple) else (constant,)
