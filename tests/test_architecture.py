"""The layers of the package: arrows point down only, and what must be light imports nothing heavy."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tepo_nemo

PACKAGE = Path(tepo_nemo.__file__).parent
HOST = {
    "nemo",
    "nemo_aligner",
    "megatron",
    "lightning",
    "pytorch_lightning",
    "apex",
    "transformer_engine",
    "tensorrt_llm",
}
HEAVY = HOST | {"torch", "transformers"}

# Top to bottom: a layer may import those below it.
ORDER = (
    "cli", "commands", "launch", "study", "bench", "nemo", "conversion", "training", "evaluation", "rollout",
    "parallel", "objectives", "reward", "data", "runs", "planning", "config", "cpu", "errors",
)  # fmt: skip
LAZY = {"cli", "commands", "launch"}  # import heavy layers inside functions, per command
LIGHT = {
    "cli",
    "commands",
    "launch",
    "study",
    "reward",
    "data",
    "runs",
    "planning",
    "config",
    "errors",
}  # no torch
WITH_HOST = {"bench", "nemo", "conversion", "cpu"}
# The mathematics and the collectives: torch, and nothing of ours but errors.
ALONE = {"objectives", "parallel", "cpu"}


class Import:
    """One import of a module of ours: what it names, and whether it runs when the module is imported."""

    def __init__(self, name: str, at_import: bool, line: int) -> None:
        self.name, self.at_import, self.line = name, at_import, line
        self.top = name.split(".")[0]

    @property
    def layer(self) -> str | None:
        """The layer of ours that it names; None for another package, or for `tepo_nemo` itself."""
        parts = self.name.split(".")
        return parts[1] if parts[0] == "tepo_nemo" and len(parts) > 1 else None


def imports_of(source: str) -> Iterator[Import]:
    yield from _walk(ast.parse(source), at_import=True)


def _walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue  # no import at all when the program runs
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, at_import, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            # `from tepo_nemo import cpu` names a layer by its alias.
            names = (
                [child.module]
                if child.module != "tepo_nemo"
                else [f"tepo_nemo.{alias.name}" for alias in child.names]
            )
            for name in names:
                yield Import(name, at_import, child.lineno)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, at_import and not inside)


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def broken_rules(layer: str, source: str) -> list[str]:
    """Every arrow of a module that may not be."""
    broken = []
    for found in imports_of(source):
        where = f"line {found.line}: {layer} imports {found.name}"
        if found.layer is not None and found.layer != layer:
            if found.layer not in ORDER:
                broken.append(f"{where}: no such layer")
            elif ORDER.index(found.layer) < ORDER.index(layer):
                broken.append(f"{where}: an arrow up")
            elif layer in ALONE and found.layer != "errors":
                broken.append(f"{where}: {layer} stands alone")
            elif layer in LAZY and found.at_import and found.layer not in LIGHT:
                broken.append(f"{where}: at import time")
        if layer in LIGHT and found.top in HEAVY and (found.at_import or layer not in LAZY | {"data"}):
            broken.append(f"{where}: a light layer")
        if layer not in WITH_HOST and found.top in HOST:
            broken.append(f"{where}: only {', '.join(sorted(WITH_HOST))} know the host")
    return broken


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_down(path):
    assert broken_rules(layer_of(path), path.read_text()) == []


def test_every_layer_is_known():
    assert {layer_of(path) for path in MODULES} <= set(ORDER)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("runs", "from tepo_nemo.training.trainer import Trainer"),
        ("runs", "def f():\n    from tepo_nemo.training.trainer import Trainer"),
        ("runs", "import torch"),
        ("runs", "def f():\n    import torch"),
        ("data", "import transformers"),
        ("config", "from tepo_nemo import objectives"),
        ("objectives", "from tepo_nemo.config.schema import Config"),
        ("parallel", "import megatron.core"),
        ("training", "from nemo_aligner.utils import x"),
        ("training", "def f():\n    from tepo_nemo.nemo.run import train"),
        ("cli", "from tepo_nemo.nemo.run import train"),
        ("launch", "from tepo_nemo.objectives.registry import build"),
        ("cli", "class A:\n    import torch"),
        ("config", "from tepo_nemo.planning.memory import Memory"),
        ("evaluation", "from tepo_nemo.surprise import x"),
    ],
)
def test_the_rules_catch_a_broken_arrow(layer, source):
    assert len(broken_rules(layer, source)) >= 1


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("training", "import torch\nfrom tepo_nemo.objectives.contract import Mean"),
        ("nemo", "from nemo_aligner.utils import x\nfrom tepo_nemo.training.trainer import Trainer"),
        ("cli", "def f():\n    from tepo_nemo.nemo.run import train"),
        ("launch", "from tepo_nemo.config.schema import Config\ndef f():\n    import torch"),
        ("data", "def f():\n    import transformers"),
        ("runs", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("planning", "from tepo_nemo.config.schema import Config\nfrom tepo_nemo.errors import UserError"),
        ("config", "import tepo_nemo"),
    ],
)
def test_the_rules_allow_a_right_arrow(layer, source):
    assert broken_rules(layer, source) == []


def modules_after(statement: str, **environment: str) -> set[str]:
    """Top-level names in sys.modules after a statement in a fresh interpreter."""
    program = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(answer.stdout.split())


def light_modules() -> Iterator[str]:
    for path in MODULES:
        if layer_of(path) in LIGHT:
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_light_layers_import_nothing_heavy():
    """What a login node has is enough for them: no torch, no NeMo, no GPU."""
    loaded = modules_after("\n".join(f"import {name}" for name in ["tepo_nemo", *light_modules()]))
    assert loaded & HEAVY == set()


def test_import_of_the_package_brings_nothing_but_itself():
    assert modules_after("import tepo_nemo") - modules_after("pass") == {"tepo_nemo"}


def test_import_inside_a_slurm_job_starts_nothing():  # faults 33
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "gpu[1-2]"}
    loaded = modules_after(
        "import tepo_nemo, tepo_nemo.cli, tepo_nemo.config.load, tepo_nemo.launch.rank", **slurm
    )
    assert loaded & (HEAVY | {"mpi4py"}) == set()


def test_validate_needs_no_torch(tmp_path):
    """The command itself, in a Python where torch and the host cannot be imported."""
    from support.toy_files import make_toy_files

    make_toy_files(tmp_path)
    program = (
        f"import sys, os\nos.chdir({str(tmp_path)!r})\n"
        f"for name in {sorted(HEAVY)!r}: sys.modules[name] = None\n"
        "from tepo_nemo.cli import main\nsys.exit(main(['validate', 'experiment=toy_cpu']))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("valid\n")
