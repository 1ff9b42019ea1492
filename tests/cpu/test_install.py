"""When the stand-ins come into place, and when they do not. Each case is a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SLURM = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "3", "SLURM_NNODES": "2"}


def run(code: str, *path: Path, **environment: str) -> object:
    """What `code` prints last, as JSON."""
    search = os.pathsep.join(map(str, (REPOSITORY, *path)))
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("package", ["apex", "transformer_engine", "tensorrt_llm"])
def test_a_real_package_is_not_shadowed(tmp_path, package):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    code = """
import json, torch, tepo_nemo.cpu
before = torch.zeros, torch.cuda.current_device
try:
    message = tepo_nemo.cpu.install()
except RuntimeError as refusal:
    message = str(refusal)
print(json.dumps([message, (torch.zeros, torch.cuda.current_device) == before]))
"""
    message, untouched = run(code, tmp_path)
    assert message.startswith(f"{package} is installed, ")
    assert "\n" not in message
    assert ("PyPI" in message) == (package == "apex")
    assert untouched


def test_no_effect_where_cuda_is_present():
    code = """
import json, os, sys, torch
torch.cuda.is_available = lambda: True
def state():
    return dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor)), dict(os.environ)
before, modules = state(), set(sys.modules)
import tepo_nemo.cpu
installed = tepo_nemo.cpu.install()
print(json.dumps([installed, state() == before, sorted(set(sys.modules) - modules)]))
"""
    assert run(code) == [False, True, ["tepo_nemo", "tepo_nemo.cpu"]]


def test_a_late_call_is_refused():
    code = """
import json, sys, types
sys.modules["nemo"] = types.ModuleType("nemo")
import tepo_nemo.cpu
try:
    tepo_nemo.cpu.install()
except RuntimeError as refusal:
    print(json.dumps(str(refusal)))
"""
    assert run(code) == "tepo_nemo.cpu.install() must be called before nemo is imported"


def test_import_in_a_slurm_job_starts_nothing():
    """Neither MPI nor TensorRT-LLM nor a stand-in comes with `import tepo_nemo`."""  # faults 33
    code = """
import json, os, sys
before = dict(os.environ)
import tepo_nemo, tepo_nemo.cpu
heavy = {"torch", "megatron", "nemo", "nemo_aligner", "mpi4py", "tensorrt_llm"}
print(json.dumps([sorted(heavy & set(sys.modules)), dict(os.environ) == before]))
"""
    assert run(code, **SLURM) == [[], True]


def test_the_stack_comes_up_in_a_slurm_job_without_mpi():
    """NeMo-Aligner's actors are importable there, with neither MPI nor TensorRT-LLM loaded."""  # faults 33
    code = """
import json, sys, tepo_nemo.cpu
installed = tepo_nemo.cpu.install()
import nemo_aligner.models.nlp.gpt.megatron_gpt_reinforce_actor
print(json.dumps([installed, sorted({"mpi4py", "tensorrt_llm"} & set(sys.modules))]))
"""
    assert run(code, **SLURM) == [True, []]
