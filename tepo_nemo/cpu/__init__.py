"""Run the real NeMo, NeMo-Aligner and Megatron-core classes on a machine without a GPU.

These libraries take CUDA, Apex, Transformer Engine and TensorRT-LLM for granted. Where no CUDA device is
present, `install` puts an equivalent of PyTorch or Megatron-core in the place of each, one module a concern.
Entry points call it explicitly; importing `tepo_nemo` never does.
"""

import importlib.util
import sys

_GPU_ONLY = ("apex", "transformer_engine", "tensorrt_llm")
_PATCHED = ("megatron", "nemo", "nemo_aligner")
_installed = False


def install() -> bool:
    """Put the stand-ins in place and import megatron.core, NeMo and NeMo-Aligner in the order that they need.

    Call it before anything imports `megatron`, `nemo` or `nemo_aligner`. A second call does nothing.

    Returns:
        True where the stand-ins are in place, False (and nothing touched) where CUDA is available.

    Raises:
        RuntimeError: one of the packages that are stood in for is installed, or the call comes too late.
    """
    global _installed
    import torch

    if _installed:
        return True
    if torch.cuda.is_available():
        return False
    _refuse_real_packages()
    _refuse_late_call()

    from tepo_nemo.cpu import cuda

    cuda.redirect()
    with cuda.without_compiler():
        # Megatron-core first: its guards find neither Apex nor Transformer Engine, and fall back to PyTorch.
        from tepo_nemo.cpu import megatron

        megatron.patch()
        from tepo_nemo.cpu import tensorrt_llm, transformer_engine

        transformer_engine.seat()
        tensorrt_llm.seat()
        from tepo_nemo.cpu import nemo

        nemo.patch()
    _installed = True
    return True


def _refuse_real_packages() -> None:
    found = [name for name in _GPU_ONLY if importlib.util.find_spec(name) is not None]
    if found:
        hint = " (the `apex` of PyPI is an unrelated project)" if "apex" in found else ""
        raise RuntimeError(
            f"{', '.join(found)} is installed, but no CUDA device is available: the CPU stand-ins do not"
            f" replace real packages; uninstall it{hint} or run where a GPU is visible"
        )


def _refuse_late_call() -> None:
    early = [name for name in _PATCHED if name in sys.modules]
    if early:
        raise RuntimeError(f"tepo_nemo.cpu.install() must be called before {', '.join(early)} is imported")
