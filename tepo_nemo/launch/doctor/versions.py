"""Whether the installed versions are those that are supported."""

from collections.abc import Iterator, Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tepo_nemo.launch.doctor.finding import Finding, finding
from tepo_nemo.launch.doctor.packages import Packages, Stack
from tepo_nemo.launch.doctor.supported import FILES, PYTHONS

_HOST = (
    "torch",
    "megatron-core",
    "nemo-toolkit",
    "nemo-aligner",
    "lightning",
    "transformers",
    "transformer-engine",
)
"""Have a line each, even where all is well."""


def check_versions(
    packages: Packages, stack: Stack, wanted: Sequence[Requirement], light: Sequence[Requirement] | None
) -> Iterator[Finding]:
    """The Python, the host stack a line each, and the other packages in one line where they are right.

    Args:
        wanted: what `stack` should have.
        light: what tepo_nemo itself needs; None where it is not installed as a package.
    """
    yield _check_python(packages.python, stack)
    if stack == "login":
        yield Finding(
            "host stack", "ok", "no torch: a login node; runs need a container or requirements/cpu.txt"
        )
    others = []
    for requirement in wanted:
        found = _check_package(packages, requirement, stack)
        if canonicalize_name(requirement.name) in _HOST or found.state != "ok":
            yield found
        else:
            others.append(found)
    if others:
        yield Finding("other packages", "ok", f"{len(others)} are as in requirements/{FILES[stack]}")
    yield from _check_light(packages, light)


def _check_python(python: tuple[int, int], stack: Stack) -> Finding:
    first, last = PYTHONS[stack]
    wanted = _dotted(first) if first == last else f"{_dotted(first)} to {_dotted(last)}"
    return finding(
        "python",
        _dotted(python),
        problem="" if python >= first else f"use Python {wanted}",
        warning="" if python <= last else f"not tested: use Python {wanted}",
    )


def _check_package(packages: Packages, requirement: Requirement, stack: Stack) -> Finding:
    """On a CPU the versions are exact and another one is untested; a container's ranges are all there is."""
    name, version = requirement.name, packages.versions.get(canonicalize_name(requirement.name))
    if version is None:
        return Finding(name, "problem", "not installed", _how_to_get(requirement, stack))
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(name, "ok", version)
    if stack == "container":
        return Finding(name, "problem", version, f"supported: {requirement}; use nvcr.io/nvidia/nemo:25.02")
    return Finding(
        name, "warning", version, f"tested with {requirement}: pip install --no-deps '{requirement}'"
    )


def _how_to_get(requirement: Requirement, stack: Stack) -> str:
    if stack == "container":
        return f"comes with the container ({requirement}): use nvcr.io/nvidia/nemo:25.02"
    return f"pip install --no-deps '{requirement}', or all of requirements/{FILES[stack]}"


def _check_light(packages: Packages, light: Sequence[Requirement] | None) -> Iterator[Finding]:
    if light is None:
        yield Finding("tepo-nemo", "warning", "not installed as a package", "pip install --no-deps -e .")
        return
    wrong = [each for each in light if not _satisfied(packages, each)]
    for requirement in wrong:
        version = packages.versions.get(canonicalize_name(requirement.name), "not installed")
        yield Finding(
            requirement.name, "problem", version, f"tepo-nemo needs it: pip install '{requirement}'"
        )
    if not wrong:
        yield Finding("tepo-nemo needs", "ok", f"all {len(light)} packages of setup.py fit")


def _satisfied(packages: Packages, requirement: Requirement) -> bool:
    version = packages.versions.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
