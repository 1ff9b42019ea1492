"""Packages that install without a word and break the stack."""

from collections.abc import Iterator

from packaging.version import Version

from tepo_nemo.launch.doctor.finding import Finding, finding
from tepo_nemo.launch.doctor.packages import Packages, Stack

_GPU_ONLY = ("transformer-engine", "tensorrt-llm")


def check_traps(packages: Packages, stack: Stack) -> Iterator[Finding]:
    """The traps that this stack can fall into."""
    yield _check_hydra(packages)
    yield _check_apex(packages, stack)
    if stack != "container":
        yield from _check_gpu_only(packages)
    if "torch" in packages.versions and packages.torch_cuda is None:
        yield from _check_torchvision(packages)
    if "nemo-toolkit" in packages.versions:
        yield _check_pangu(packages)
        yield _check_numpy(packages)


def _check_hydra(packages: Packages) -> Finding:
    """Any antlr extra of math-verify but antlr4_9_3 takes hydra-core back to 0.11, or math-verify to 0.3."""
    hydra = packages.versions.get("hydra-core", "absent")
    antlr = packages.versions.get("antlr4-python3-runtime", "absent")
    good = hydra.startswith("1.3.") and antlr == "4.9.3"
    repair = (
        "pip install 'hydra-core==1.3.2' 'antlr4-python3-runtime==4.9.3' 'math-verify[antlr4_9_3]>=0.9,<0.10'"
    )
    return finding(
        "hydra and antlr",
        f"hydra-core {hydra}, antlr4-python3-runtime {antlr}",
        problem=""
        if good
        else f"hydra-core 1.3 needs antlr 4.9.3, which another antlr extra replaces: {repair}",
    )


def _check_apex(packages: Packages, stack: Stack) -> Finding:
    found = {"absent": "absent", "nvidia": "NVIDIA's", "other": "not NVIDIA's (PyPI's `apex` is unrelated)"}
    if packages.apex == "other":
        advice = "pip uninstall apex" + (
            "; NVIDIA's comes with the container" if stack == "container" else ""
        )
    elif packages.apex == "absent" and stack == "container":
        advice = "NeMo needs NVIDIA's Apex, which comes with the container: use nvcr.io/nvidia/nemo:25.02"
    else:
        advice = ""
    return finding("apex", found[packages.apex], problem=advice)


def _check_gpu_only(packages: Packages) -> Iterator[Finding]:
    """The CPU stand-ins refuse to replace real packages."""
    for name in _GPU_ONLY:
        if name in packages.versions:
            yield Finding(
                name,
                "problem",
                packages.versions[name],
                f"the CPU stack stands in for it: pip uninstall {name}",
            )


def _check_torchvision(packages: Packages) -> Iterator[Finding]:
    """A torchvision for GPUs does not load beside a CPU torch, and modelopt brings one."""
    vision = packages.versions.get("torchvision")
    if vision is not None and Version(vision).local != "cpu":
        yield Finding(
            "torchvision",
            "problem",
            f"{vision} beside a CPU build of torch",
            "breaks every import (`torchvision::nms does not exist`): pip uninstall torchvision",
        )
    if "nvidia-modelopt" in packages.versions:
        yield Finding(
            "modelopt",
            "warning",
            packages.versions["nvidia-modelopt"],
            "is not used and brings a torchvision: pip uninstall nvidia-modelopt",
        )


def _check_pangu(packages: Packages) -> Finding:
    version = packages.versions.get("pangu", "absent")
    good = version != "absent" and Version(version) <= Version("4.0.6.1")
    return finding(
        "pangu", version, problem="" if good else "fails NeMo's import: pip install --no-deps pangu==4.0.6.1"
    )


def _check_numpy(packages: Packages) -> Finding:
    version = packages.versions.get("numpy", "absent")
    good = version != "absent" and Version(version) < Version("2")
    return finding(
        "numpy",
        version,
        problem="" if good else "NeMo 2.2 and Megatron-core 0.11 need numpy 1: pip install 'numpy<2'",
    )
