"""Functions of other projects, live and unmodified, without importing what they do not need.

A package is looked for in the folder that TEPO_NEMO_PEERS names (as `pip install --no-deps --target` makes
it), then in the environment. Packages whose import pulls in more than is installed are never imported: the
one file is loaded, or the one function is taken out of it.
"""

import ast
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

FOLDER_VARIABLE = "TEPO_NEMO_PEERS"
TESTED = {"verl": "0.9.1", "trl": "1.16.0"}


class Absent(Exception):
    """An implementation that cannot be measured here; the message says why."""


def folder_of(package: str) -> Path:
    """The folder of an optional package, which is not imported; Absent if there is none."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given and (Path(given) / package).is_dir():
        return Path(given) / package
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise Absent(f"not installed (pip install --no-deps {package}=={TESTED[package]})")
    return Path(found.submodule_search_locations[0])


def version_of(package: str) -> str | None:
    """The version of an installed package or of one in the folder of peers; None if there is none."""
    given = os.environ.get(FOLDER_VARIABLE)
    for paths in ([given] if given else [], sys.path):
        for found in importlib.metadata.distributions(name=package, path=paths):
            return found.version
    return None


def load_file(path: Path, name: str) -> ModuleType:
    """The module of one file, without the packages around it; Absent if there is no such file."""
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise Absent(f"this version has no {path.name}")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_functions(path: Path, names: Iterable[str], given: Mapping[str, Any]) -> ModuleType:
    """Functions of a file whose imports are not wanted, as they are written there.

    Args:
        names: of functions, or Class.method; the module has a method under its own name.
        given: what stands in for the imports that the functions use.

    Raises:
        Absent: the file or a function in it does not exist.
    """
    if not path.is_file():
        raise Absent(f"this version has no {path.name}")
    definitions = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
            definitions |= {f"{node.name}.{method.name}": method for method in methods}
    missing = [name for name in names if name not in definitions]
    if missing:
        raise Absent(f"this version has no {missing[0]}")
    module = ModuleType(path.stem)
    vars(module).update(given)
    code = compile(ast.Module([definitions[name] for name in names], []), str(path), "exec")
    exec(code, vars(module))
    return module


def load_trl() -> ModuleType:
    """TRL's functions on logits; their file imports accelerate, datasets and a recent transformers."""
    import torch

    return load_functions(
        folder_of("trl") / "trainer/utils.py",
        [
            "_supports_trl_loss_kernel",
            "selective_log_softmax",
            "entropy_from_logits",
            "selective_log_softmax_and_entropy",
            "maybe_gather_lm_head_ctx",
        ],
        {
            "torch": torch,
            "F": torch.nn.functional,
            "is_triton_available": _no_triton,
            "nullcontext": nullcontext,
        },
    )


def load_trl_chunked() -> ModuleType:
    """TRL's chunked output layer; its file asks transformers for Triton, and the one above for a function."""
    import transformers.utils

    root = "tepo_nemo_bench_trl"
    for name in (root, f"{root}.kernels", f"{root}.trainer"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules[f"{root}.trainer.utils"] = load_trl()
    with mock.patch.object(transformers.utils, "is_triton_available", _no_triton, create=True):
        return load_file(folder_of("trl") / "kernels/chunked_logprob.py", f"{root}.kernels.chunked_logprob")


def load_verl() -> ModuleType:
    return load_file(folder_of("verl") / "utils/megatron/tensor_parallel.py", "tepo_nemo_bench_verl")


def _no_triton() -> bool:
    """Triton's kernels need a GPU: on a CPU their torch equivalent is what runs, installed or not."""
    return False
