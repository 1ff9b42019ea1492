"""Each check on right and on wrong facts, and the facts of made-up machines."""

import os
import re
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tepo_nemo import cli
from tepo_nemo.launch.doctor import report
from tepo_nemo.launch.doctor.devices import Devices, Gpu, check_devices, gather_devices, links
from tepo_nemo.launch.doctor.packages import Packages
from tepo_nemo.launch.doctor.ranks import check_ranks
from tepo_nemo.launch.doctor.supported import light, parse, supported
from tepo_nemo.launch.doctor.system import System, check_system, gather_system
from tepo_nemo.launch.doctor.traps import check_traps
from tepo_nemo.launch.doctor.versions import check_versions

REPOSITORY = Path(__file__).parents[2]
GIB = 2**30

LIGHT = {"hydra-core": "1.3.2", "antlr4-python3-runtime": "4.9.3", "math-verify": "0.9.0"}
CPU = Packages(
    (3, 11),
    LIGHT
    | {
        "torch": "2.13.0+cpu", "megatron-core": "0.11.0", "nemo-toolkit": "2.2.1", "nemo-aligner": "0.7.0",
        "numpy": "1.26.4", "pangu": "4.0.6.1",
    },
    None,
    "absent",
)  # fmt: skip
CONTAINER = Packages(
    (3, 12),
    LIGHT
    | {
        "torch": "2.6.0a0+ecf3bae40a.nv25.1", "megatron-core": "0.11.0", "nemo-toolkit": "2.2.0",
        "nemo-aligner": "0.7.0", "lightning": "2.4.0", "transformers": "4.48.3", "numpy": "1.26.4",
        "transformer-engine": "2.0.0+c1a2b3c", "pangu": "4.0.6.1",
    },
    "12.8",
    "nvidia",
)  # fmt: skip
LOGIN = Packages((3, 12), LIGHT, None, "absent")
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559, 4, 9.0, "550.54.15", 0)
# `nvidia-smi topo -m` of a machine with four GPUs of which two pairs have NVLink, and an adapter
TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def without(packages: Packages, *names: str, **versions: str) -> Packages:
    """`packages` without some, and with others (written with _)."""
    kept = {name: version for name, version in packages.versions.items() if name not in names}
    return replace(
        packages, versions=kept | {name.replace("_", "-"): text for name, text in versions.items()}
    )


def states(findings) -> dict[str, str]:
    """The state of each check that is not ok."""
    return {each.check: each.state for each in findings if each.state != "ok"}


@pytest.mark.parametrize(
    ("packages", "gpus", "stack"),
    [
        (LOGIN, False, "login"),
        (LOGIN, True, "login"),  # a login node with a GPU for pictures
        (CPU, False, "cpu"),
        (CPU, True, "container"),
        (replace(CPU, torch_cuda="13.0"), False, "cpu"),  # pip's own torch on a laptop
        (CONTAINER, True, "container"),
        (CONTAINER, False, "container"),
        (replace(CPU, apex="other"), False, "cpu"),
    ],
)
def test_which_stack_is_meant(packages, gpus, stack):
    assert packages.stack(gpus) == stack


RANGES = [Requirement("nemo_toolkit>=2.2,<2.3"), Requirement("torch>=2.5.0a0,<2.8"), Requirement("numpy<2")]
PINS = [Requirement("nemo_toolkit==2.2.1"), Requirement("torch==2.13.0"), Requirement("numpy==1.26.4")]


@pytest.mark.parametrize(
    ("packages", "stack", "expected"),
    [
        (CONTAINER, "container", {}),
        (CPU, "cpu", {}),
        (LOGIN, "login", {}),
        (without(CONTAINER, nemo_toolkit="2.1.0"), "container", {"nemo_toolkit": "problem"}),
        (without(CONTAINER, torch="2.4.0a0+3bcc3cddb5.nv24.7"), "container", {"torch": "problem"}),
        (without(CONTAINER, "torch"), "container", {"torch": "problem"}),
        (without(CPU, numpy="1.25.0"), "cpu", {"numpy": "warning"}),
        (without(CPU, "nemo-toolkit"), "cpu", {"nemo_toolkit": "problem"}),
        (replace(CPU, python=(3, 12)), "cpu", {"python": "warning"}),
        (replace(LOGIN, python=(3, 9)), "login", {"python": "problem"}),
        (replace(CONTAINER, python=(3, 12)), "container", {}),
        (without(LOGIN, math_verify="0.3.3"), "login", {"math-verify": "problem"}),
        (without(LOGIN, "math-verify"), "login", {"math-verify": "problem"}),
    ],
)
def test_versions(packages, stack, expected):
    wanted = {"container": RANGES, "cpu": PINS, "login": []}[stack]
    needs = [Requirement("math-verify[antlr4_9_3]<0.10,>=0.9"), Requirement("hydra-core<1.4,>=1.3")]
    found = list(check_versions(packages, stack, wanted, needs))
    assert states(found) == expected
    assert all(each.advice for each in found if each.state != "ok")


def test_a_copy_that_is_not_installed_is_a_warning():
    assert states(check_versions(LOGIN, "login", [], None)) == {"tepo-nemo": "warning"}


def test_the_container_and_the_cpu_stack_are_one_generation():
    """The ranges of the container hold what is tested here, but for torch."""
    tested = {each.name: str(each.specifier).removeprefix("==") for each in supported("cpu")}
    for requirement in supported("container"):
        if requirement.name in tested and requirement.name != "torch":
            assert requirement.specifier.contains(tested[requirement.name]), requirement.name


def test_this_python_is_the_stack_that_the_tests_are_for():
    names = {each.name for each in supported("cpu")}
    assert {"torch", "nemo_toolkit", "packaging"} <= names
    assert "pytest" not in names  # no run needs it
    assert {each.name for each in light()} >= {"hydra-core", "pydantic"}


def test_requirement_files_are_read_up_to_the_tests():
    text = "# A\ntorch==2  # why\n\nnumpy<2\n\n# Tests\npytest==9\n"
    assert [str(each) for each in parse(text)] == ["torch==2", "numpy<2"]


@pytest.mark.parametrize(
    ("packages", "stack", "expected"),
    [
        (CPU, "cpu", {}),
        (CONTAINER, "container", {}),
        (LOGIN, "login", {}),
        # the antlr extra that takes hydra-core back
        (
            without(CPU, hydra_core="0.11.3", antlr4_python3_runtime="4.13.2"),
            "cpu",
            {"hydra and antlr": "problem"},
        ),
        (without(CPU, antlr4_python3_runtime="4.11.0"), "cpu", {"hydra and antlr": "problem"}),
        (without(LOGIN, "hydra-core"), "login", {"hydra and antlr": "problem"}),
        (replace(CPU, apex="other"), "cpu", {"apex": "problem"}),
        (replace(CONTAINER, apex="other"), "container", {"apex": "problem"}),
        (replace(CONTAINER, apex="absent"), "container", {"apex": "problem"}),
        (without(CPU, tensorrt_llm="0.17.0"), "cpu", {"tensorrt-llm": "problem"}),
        (without(CONTAINER, tensorrt_llm="0.17.0"), "container", {}),
        # pip's torchvision beside a CPU torch; the CPU build does no harm
        (without(CPU, torchvision="0.28.0"), "cpu", {"torchvision": "problem"}),
        (without(CPU, torchvision="0.28.0+cu128"), "cpu", {"torchvision": "problem"}),
        (without(CPU, torchvision="0.28.0+cpu"), "cpu", {}),
        (replace(without(CPU, torchvision="0.28.0"), torch_cuda="13.0"), "cpu", {}),
        (without(CPU, nvidia_modelopt="0.37.0"), "cpu", {"modelopt": "warning"}),
        (without(CONTAINER, torchvision="0.20.0a0", nvidia_modelopt="0.23.0"), "container", {}),
        (without(CPU, pangu="5.0.0"), "cpu", {"pangu": "problem"}),
        (without(CPU, pangu="4.0.6"), "cpu", {}),
        (without(CPU, "pangu"), "cpu", {"pangu": "problem"}),
        (without(CPU, numpy="2.2.0"), "cpu", {"numpy": "problem"}),
        (without(LOGIN, numpy="2.2.0"), "login", {}),  # the light layers take it
    ],
)
def test_traps(packages, stack, expected):
    found = list(check_traps(packages, stack))
    assert states(found) == expected
    assert all(each.advice for each in found if each.state != "ok")


@pytest.mark.parametrize(
    ("environ", "state"),
    [
        ({}, "ok"),
        ({"SLURM_PROCID": "3", "PMIX_RANK": "3"}, "ok"),
        ({"RANK": "3", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "3"}, "ok"),
        ({"RANK": "3", "WORLD_SIZE": "8"}, "warning"),  # torchrun
        ({"SLURM_PROCID": "3"}, "warning"),  # srun without --mpi
        ({"RANK": "1", "PMIX_RANK": "0"}, "problem"),  # torchrun under srun
        ({"SLURM_PROCID": "1", "PMI_RANK": "0"}, "problem"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "problem"),  # mpirun: torch.distributed would see a world of 1
    ],
)
def test_ranks(environ, state):
    assert check_ranks(environ).state == state


NONE = Devices((), None, "", (), 1)
EIGHT = Devices((H100,) * 2, None, "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n", ("mlx5_0",), 2)


@pytest.mark.parametrize(
    ("devices", "environ", "needed", "expected"),
    [
        (NONE, {}, False, {}),
        (NONE, {}, True, {"GPUs": "problem"}),
        (EIGHT, {}, True, {}),
        (replace(NONE, failure="Driver/library version mismatch"), {}, False, {"GPUs": "problem"}),
        (replace(EIGHT, gpus=(H100, replace(H100, name="NVIDIA A100"))), {}, True, {"GPUs": "warning"}),
        (replace(EIGHT, gpus=(H100, replace(H100, used_mib=9000))), {}, True, {"GPU 1": "warning"}),
        (replace(EIGHT, gpus=(replace(H100, errors=2), H100)), {}, True, {"GPU 0": "warning"}),
        (replace(EIGHT, gpus=(replace(H100, errors=None), H100)), {}, True, {}),
        (replace(EIGHT, gpus=(replace(H100, compute=7.5),), topology=""), {}, True, {"GPU 0": "warning"}),
        (replace(EIGHT, gpus=(H100,) * 4, topology=TOPOLOGY), {}, True, {"GPU links": "warning"}),
        (replace(EIGHT, infiniband=()), {}, True, {"network": "warning"}),
        (replace(EIGHT, infiniband=(), nodes=1), {}, True, {}),
        (EIGHT, {"NCCL_IB_DISABLE": "1"}, True, {"NCCL_IB_DISABLE": "warning"}),
        (EIGHT, {"NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "INFO"}, True, {}),
    ],
)
def test_devices(devices, environ, needed, expected):
    found = list(check_devices(devices, environ, needed))
    assert states(found) == expected
    assert all(each.advice for each in found if each.state != "ok")


def test_links_of_each_pair():
    # pairs 01, 02, 03, 12, 13, 23
    assert links(TOPOLOGY) == ["NV12", "SYS", "SYS", "SYS", "SYS", "NV12"]
    assert links("") == []


def test_nvidia_smi_is_asked(tmp_path, monkeypatch):
    program(
        tmp_path / "nvidia-smi",
        'if [ "$1" = topo ]; then printf "GPU0\\t X \\n"; else\n'
        'echo "NVIDIA H100 80GB HBM3, 81559, 4, 9.0, 550.54.15, 0"\n'
        'echo "NVIDIA A10, 23028, 812, 8.6, 550.54.15, [N/A]"; fi',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    devices = gather_devices({"SLURM_NNODES": "4"})
    assert devices.gpus == (H100, Gpu("NVIDIA A10", 23028, 812, 8.6, "550.54.15", None))
    assert (devices.failure, devices.topology, devices.nodes) == (None, "GPU0\t X \n", 4)


def test_nvidia_smi_that_fails_is_told(tmp_path, monkeypatch):
    program(tmp_path / "nvidia-smi", "echo 'Failed to initialize NVML: no driver'; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    devices = gather_devices({})
    assert (devices.gpus, devices.failure) == ((), "Failed to initialize NVML: no driver")


def program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


FINE = System(Path("runs"), None, 1000 * GIB, 64 * GIB, 65536, None, ("utf-8", "UTF-8", "utf-8"))


@pytest.mark.parametrize(
    ("system", "gpus", "expected"),
    [
        (FINE, True, {}),
        (FINE, False, {}),
        (replace(FINE, refusal="/runs: Read-only file system"), False, {"run directory": "problem"}),
        (replace(FINE, free=100 * GIB), True, {"free space": "warning"}),
        (replace(FINE, free=100 * GIB), False, {}),
        (replace(FINE, shared=GIB // 16), True, {"shared memory": "problem"}),  # what Docker gives
        (replace(FINE, shared=GIB // 16), False, {"shared memory": "warning"}),
        (replace(FINE, shared=None), True, {"shared memory": "problem"}),
        (replace(FINE, open_files=1024), True, {"open files": "warning"}),
        (replace(FINE, locked_memory=8 * 2**20), True, {"locked memory": "warning"}),
        (replace(FINE, encodings=("utf-8", "ANSI_X3.4-1968", "utf-8")), False, {"encoding": "problem"}),
        (replace(FINE, encodings=("utf-8", "UTF-8", "iso8859-1")), False, {"encoding": "problem"}),
    ],
)
def test_system(system, gpus, expected):
    found = list(check_system(system, gpus, infiniband=gpus))
    assert states(found) == expected
    assert all(each.advice for each in found if each.state != "ok")


def test_the_run_directory_is_tried(tmp_path):
    asked = tmp_path / "not" / "made" / "yet"
    assert gather_system(asked).refusal is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert gather_system(tmp_path / "file" / "run").refusal == f"{tmp_path}/file is a file"
    # /proc is a folder that takes no files, from nobody
    assert gather_system(Path("/proc/run")).refusal == "/proc: No such file or directory"


@pytest.mark.parametrize(
    ("file", "apex"),
    [("optimizers/fused_adam.py", "nvidia"), ("lib/libapex.py", "other")],  # NVIDIA's; PyPI's apex 0.9.10
)
def test_packages_are_found_without_importing_them(tmp_path, file, apex):
    (tmp_path / "apex" / file).parent.mkdir(parents=True)
    (tmp_path / "apex" / file).touch()
    for name, text in (("apex", ""), ("torch", "")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')" + text)
    (tmp_path / "torch" / "version.py").write_text(
        "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    (tmp_path / "Some_Package-1.5.dist-info").mkdir()
    (tmp_path / "Some_Package-1.5.dist-info" / "METADATA").write_text("Name: Some.Package\nVersion: 1.5\n")
    code = (
        "from tepo_nemo.launch.doctor.packages import gather_packages\nfound = gather_packages()\n"
        "print(found.apex, found.torch_cuda, found.versions['some-package'])"
    )
    search = f"{tmp_path}:{REPOSITORY}"
    answer = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True
    )
    assert (answer.stdout, answer.stderr) == (f"{apex} 12.8 1.5\n", "")


def test_the_command(tmp_path, monkeypatch, capsys):
    """On this machine, with whatever it has; the report holds no variable but named ones."""
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    code = cli.main(["doctor", "--output", str(tmp_path / "runs"), "--report", str(tmp_path / "doctor.md")])
    shown, page = capsys.readouterr().out, (tmp_path / "doctor.md").read_text()
    assert shown.splitlines()[-1].startswith("0 problems" if code == 0 else "")
    assert re.search(r"hydra-core 1\.3\.\d+, antlr4-python3-runtime 4\.9\.3", shown)
    assert "| NCCL_DEBUG | WARN |" in page and "| hydra-core | 1.3." in page
    assert "secret" not in page


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warning", 0), ("problem", 1)])
def test_the_exit_code_is_1_where_there_is_a_problem(state, code, monkeypatch, capsys):
    found = report.Finding("a check", state, "found", "do")
    monkeypatch.setattr(report, "examine", lambda _: report.Examination((found,), LOGIN, NONE, {}))
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().out.endswith(
        f"{int(state == 'problem')} problems, {int(state == 'warning')} warnings\n"
    )


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, capsys):
    assert cli.main(["doctor", "--report", str(tmp_path / "none" / "doctor.md")]) == 2
    assert capsys.readouterr().err == (
        f"tepo-nemo: error: --report {tmp_path}/none/doctor.md: cannot be written "
        "(No such file or directory); choose another file\n"
    )


def test_a_login_node_needs_no_torch():
    """The command where torch and the host cannot be imported."""
    heavy = ["torch", "nemo", "nemo_aligner", "megatron", "lightning", "transformers", "apex", "tensorrt_llm"]
    code = (
        f"import sys\nfor name in {heavy!r}: sys.modules[name] = None\n"
        "from tepo_nemo.cli import main\nsys.exit(main(['doctor', '--output', '/tmp']))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert answer.stderr == "" and answer.returncode in (0, 1)
    assert "tepo-nemo doctor" in answer.stdout
