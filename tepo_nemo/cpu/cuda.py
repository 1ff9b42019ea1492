"""`torch.cuda` calls and `device="cuda"` arguments, answered by the CPU device."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")


def redirect() -> None:
    """Make CUDA the name of the CPU device in this process. `torch.cuda.is_available()` stays False."""
    # Read at import or model construction by NeMo and Megatron-core; the container sets both.
    os.environ.setdefault("NVIDIA_PYTORCH_VERSION", "25.02")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _redirect_runtime()
    _redirect_random_state()
    _redirect_tensor_types()
    _redirect_device_arguments()
    _redirect_autocast()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let what is imported inside leave its functions as they are.

    Megatron-core and NeMo hand their small fused functions to `torch.compile` at import. On a CPU that loads
    a compiler stack, a quarter of the start-up, and runs the C++ compiler at the first call of each.
    """
    compiler = torch.compile
    torch.compile = _uncompiled
    try:
        yield
    finally:
        torch.compile = compiler


def _uncompiled(model: Callable | None = None, **_: Any) -> Callable:
    """`torch.compile` that leaves the function as it is."""
    return (lambda function: function) if model is None else model


def _no_op() -> Callable[..., None]:
    """A call that only concerns a GPU. A new one each time, since TorchDynamo keeps one rule a function."""
    return lambda *_, **__: None


class _Stream(torch.cpu.Stream):
    """PyTorch's no-op CPU stream with the rest of the CUDA stream's methods."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def synchronize(self) -> None:
        pass


class _Event(torch.cpu.Event):
    """PyTorch's no-op CPU event, with the CUDA event's constructor."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _redirect_runtime() -> None:
    stream = _Stream()
    torch.cuda.current_device = lambda: _CPU
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, _no_op())
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.current_stream = lambda device=None: stream
    torch.cuda.default_stream = lambda device=None: stream
    torch.cuda.stream = torch.cpu.stream
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self


def _redirect_random_state() -> None:
    """The CUDA generator is the CPU generator."""

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
        # `torch.manual_seed` itself calls `manual_seed_all`, which stays the no-op that it is without a GPU.
        module.manual_seed = torch.manual_seed


def _redirect_tensor_types() -> None:
    """`torch.cuda.FloatTensor` and the type names that Megatron-core's optimizers compare with."""
    for name in ("Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double", "Bool"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    plain_type = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return plain_type(self, dtype, *args, **kwargs)

    torch.Tensor.type = type_


def _is_cuda(device: Any) -> bool:
    """Whether a device argument (string, torch.device, or bare index) names a GPU."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(function: Callable, positional: bool = False) -> Callable:
    """Wrap `function` so that a CUDA `device` (keyword, or first positional after self) becomes the CPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if positional and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return function(*args, **kwargs)

    return call


def _redirect_device_arguments() -> None:
    """Wrap what takes a device; a TorchFunctionMode would cost every operation some microseconds."""
    # PyTorch's own list of the functions that make a tensor on a device, and the one `*_like` that
    # Megatron-core gives a device. Others stay: NeMo has them in TorchScript, which takes no wrapper.
    for function in (*_device_constructors(), torch.empty_like):
        if getattr(torch, function.__name__, None) is function:
            setattr(torch, function.__name__, _on_cpu(function))
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to, positional=True)
    torch.nn.Module.to = _on_cpu(torch.nn.Module.to, positional=True)


def _redirect_autocast() -> None:
    """Mixed precision: both the autocast region and the autograd functions that follow its state."""

    def on_cpu(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, device_type: str, **kwargs: Any) -> Any:
            return function(*args, device_type="cpu" if device_type == "cuda" else device_type, **kwargs)

        return call

    torch.amp.custom_fwd, torch.amp.custom_bwd = on_cpu(torch.amp.custom_fwd), on_cpu(torch.amp.custom_bwd)
    plain_init = torch.autocast.__init__

    def init(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain_init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.autocast.__init__ = init
