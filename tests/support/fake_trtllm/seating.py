"""Puts the fakes where NeMo's exporter and Megatron-core import TensorRT-LLM, and gives them a device."""

import os
import sys
from types import ModuleType
from typing import Any

import torch
from support.fake_trtllm import build, configs, mpi, runtime, tensorrt
from support.fake_trtllm.faults import Faults


def seat(faults: Faults | None = None) -> Faults:
    """Put them into `sys.modules` of this process. Returns the switches, which may be turned at any time."""
    faults = faults or Faults()
    session = mpi.Session(faults)
    runtime.ModelRunner.session_of_ranks = session
    tensorrt.Refitter.faults = faults
    runner = runtime.ModelRunnerOf013 if faults.without_multi_block_mode else runtime.ModelRunner
    for name, content in _contents(session, runner).items():
        _module(name, content)
    _give_numbers_to_devices()
    return faults


def _contents(session: mpi.Session, runner: type) -> dict[str, dict[str, Any]]:
    """Modules by name; parents come first."""
    gated = {"swiglu": "silu", "fast-swiglu": "silu"}
    return {
        "tensorrt": {
            name: getattr(tensorrt, name)
            for name in ("DataType", "TensorLocation", "Logger", "Weights", "Refitter")
        },
        "mpi4py": {},
        "mpi4py.MPI": {"COMM_WORLD": mpi.Communicator()},
        "mpi4py.futures": {"MPIPoolExecutor": object},
        "tensorstore": {},
        "tiktoken": {"Encoding": object},
        "tensorrt_llm": {
            "Mapping": configs.Mapping,
            "mpi_rank": session.rank,
            "mpi_world_size": lambda: 1,
            "mpi_barrier": lambda: None,
            "__version__": "0.17.0",
        },
        "tensorrt_llm._utils": {
            "mpi_comm": mpi.Communicator,
            "numpy_to_torch": None,
            "torch_to_numpy": None,
            "pad_vocab_size": None,
            "str_dtype_to_torch": runtime.DTYPES.__getitem__,
            "torch_dtype_to_trt": tensorrt.DataType,
        },
        "tensorrt_llm._common": {"check_max_num_tokens": build.check_max_num_tokens},
        "tensorrt_llm.bindings": {
            "MpiComm": _Splitter(session),
            "GptJsonConfig": runtime.GptJsonConfig,
        },
        "tensorrt_llm.builder": {"BuildConfig": build.BuildConfig, "Engine": runtime.Engine},
        "tensorrt_llm.commands": {},
        "tensorrt_llm.commands.build": {"build": build.build},
        "tensorrt_llm.functional": {"non_gated_version": lambda name: gated.get(name, name)},
        "tensorrt_llm.layers": {"MoeConfig": configs.MoeConfig},
        "tensorrt_llm.logger": {"logger": _Logger()},
        "tensorrt_llm.lora_manager": {"LoraManager": object, "LoraConfig": object},
        "tensorrt_llm.models": {
            "LLaMAForCausalLM": build.LLaMAForCausalLM,
            "QWenForCausalLM": build.QWenForCausalLM,
            "GemmaConfig": configs.GemmaConfig,
            "PretrainedConfig": configs.PretrainedConfig,
        },
        **{f"tensorrt_llm.models.{family}": {} for family in ("gpt", "llama", "falcon", "qwen")},
        "tensorrt_llm.models.gpt.config": {"GPTConfig": configs.GPTConfig},
        "tensorrt_llm.models.llama.config": {"LLaMAConfig": configs.LLaMAConfig},
        "tensorrt_llm.models.falcon.config": {"FalconConfig": configs.FalconConfig},
        "tensorrt_llm.models.qwen.config": {"QWenConfig": configs.QWenConfig},
        "tensorrt_llm.models.modeling_utils": {
            "PretrainedConfig": configs.PretrainedConfig,
            "optimize_model": build.optimize_model,
            "preprocess_weights": build.preprocess_weights,
        },
        "tensorrt_llm.plugin": {"PluginConfig": build.PluginConfig},
        "tensorrt_llm.quantization": {"QuantMode": object},
        "tensorrt_llm.runtime": {
            "ModelConfig": object,
            "ModelRunner": runner,
            "ModelRunnerCpp": type("ModelRunnerCpp", (), {}),
            "SamplingConfig": runtime.SamplingConfig,
        },
        "tensorrt_llm.runtime.generation": {"DISABLE_TORCH_DEVICE_SET": _DeviceSwitch()},
    }


class _Splitter:
    """`bindings.MpiComm`, whose methods are static."""

    def __init__(self, session: mpi.Session) -> None:
        self.split = session.split


class _DeviceSwitch:
    """Read from the environment when TensorRT-LLM is imported; here when it is asked for."""

    def __bool__(self) -> bool:
        return os.environ.get("DISABLE_TORCH_DEVICE_SET") == "1"


class _Logger:
    def set_level(self, level: str) -> None:
        assert level == "info"


def _module(name: str, content: dict[str, Any]) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    module.__path__ = []  # a package: its modules may be imported
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], own, module)


class _Torch:
    """`torch` for a module that takes a device to be a number, or asks for pinned memory."""

    def __init__(self) -> None:
        self.cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return torch.empty(*size, **options)


class _Cuda:
    def current_device(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _give_numbers_to_devices() -> None:
    from megatron.core.export.trtllm.trtllm_weights_converter import (
        distributed_trtllm_model_weights_converter as converter,
    )
    from nemo.export.trt_llm import tensorrt_llm_run

    tensorrt_llm_run.torch = _Torch()
    converter.torch = _Torch()
