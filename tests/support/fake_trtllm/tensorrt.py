"""TensorRT's refitter. Weights are raw memory: type, address and count, read when the engine is refitted."""

import ctypes
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from support.fake_trtllm.engine import TABLES
from support.fake_trtllm.faults import Faults


class DataType(Enum):
    FLOAT = torch.float32
    HALF = torch.float16
    BF16 = torch.bfloat16


class TensorLocation(Enum):
    DEVICE = 0
    HOST = 1


class Logger:
    ERROR = 1

    def __init__(self, severity: int) -> None:
        assert severity == self.ERROR


class Weights:
    def __init__(self, type: DataType, ptr: int, count: int) -> None:  # noqa: A002  its name
        assert isinstance(type, DataType)
        self.type, self.ptr, self.count = type, ptr, count


class Refitter:
    """Swaps weights of an engine by name."""

    faults: Faults

    def __init__(self, engine: Any, logger: Logger) -> None:
        assert isinstance(logger, Logger)
        self._weights: dict[str, torch.Tensor] = engine.weights
        self._given: dict[str, Weights] = {}

    def get_all_weights(self) -> list[str]:
        names = [name for name in self._weights if name not in self.faults.folded]
        return [*names, *TABLES, *self.faults.extra]

    def get_weights_prototype(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(dtype=DataType(self._weights[name].dtype), size=self._weights[name].numel())

    def set_named_weights(self, name: str, weights: Weights, location: TensorLocation) -> bool:
        assert location is TensorLocation.HOST, "there is no device here"
        if weights.count != self._weights[name].numel():
            return False
        self._given[name] = weights
        return True

    def refit_cuda_engine(self) -> bool:
        if self.faults.refit_fails:
            return False
        for name, weights in self._given.items():
            if self.faults.stale or any(f".layers.{layer}." in name for layer in self.faults.stale_layers):
                continue
            own = self._weights[name]
            ctypes.memmove(own.data_ptr(), weights.ptr, own.numel() * own.element_size())
        return True
