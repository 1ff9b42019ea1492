"""GPUs and what connects them."""

import csv
import io
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tepo_nemo.launch.doctor.finding import Finding, finding

QUERY = (
    "name",
    "memory.total",
    "memory.used",
    "compute_cap",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
)
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_VISIBLE_DEVICES",
    "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE", "NCCL_ALGO", "NCCL_PROTO",
)  # fmt: skip
"""Variables that change what devices and NCCL do, as far as they are looked at or reported."""
_BUSY_MIB = 1024  # more than contexts and displays take
_TIMEOUT_S = 60  # a driver that hangs must not hang the report


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi."""

    name: str
    total_mib: int
    used_mib: int
    compute: float  # compute capability: 9.0 is Hopper
    driver: str
    errors: int | None  # uncorrected ones since the driver was loaded; None without ECC


@dataclass(frozen=True)
class Devices:
    """The GPUs of this machine and their connections."""

    gpus: tuple[Gpu, ...]
    failure: str | None  # what nvidia-smi said where it failed
    topology: str  # of `nvidia-smi topo -m`; empty without GPUs
    infiniband: tuple[str, ...]  # names of the adapters, RoCE included
    nodes: int  # of the SLURM job, or 1


def gather_devices(environ: Mapping[str, str]) -> Devices:
    """Ask nvidia-smi, where it is installed, and the kernel."""
    gpus, failure, topology = (), None, ""
    if shutil.which("nvidia-smi") is not None:
        query = [f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
        answer, failure = _nvidia_smi(*query)
        if failure is None:
            gpus = read_gpus(answer)
            topology = _nvidia_smi("topo", "-m")[0]
    adapters = Path("/sys/class/infiniband")
    found = sorted(os.listdir(adapters)) if adapters.is_dir() else []
    return Devices(gpus, failure, topology, tuple(found), int(environ.get("SLURM_NNODES", "1")))


def _nvidia_smi(*arguments: str) -> tuple[str, str | None]:
    """What it prints, and why it failed."""
    try:
        ended = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_TIMEOUT_S} s"
    return ended.stdout, None if ended.returncode == 0 else " ".join((ended.stdout + ended.stderr).split())


def read_gpus(answer: str) -> tuple[Gpu, ...]:
    """From the answer to `QUERY`, as csv without header and units."""
    rows = [[field.strip() for field in row] for row in csv.reader(io.StringIO(answer)) if row]
    return tuple(
        Gpu(name, int(total), int(used), float(compute), driver, int(errors) if errors.isdecimal() else None)
        for name, total, used, compute, driver, errors in rows
    )


def check_devices(devices: Devices, environ: Mapping[str, str], needed: bool) -> Iterator[Finding]:
    """The GPUs and their connections.

    Args:
        environ: has those of `VARIABLES` that are set.
        needed: the installed stack is one for GPUs.
    """
    yield _check_presence(devices, needed)
    for number, gpu in enumerate(devices.gpus):
        advice = "; ".join(_wrong_with(gpu))
        if advice:
            yield Finding(f"GPU {number}", "warning", f"{gpu.name}, {gpu.used_mib} MiB in use", advice)
    if len(devices.gpus) > 1:
        yield _check_links(devices.topology)
    if devices.nodes > 1:
        yield _check_network(devices)
    yield from _check_nccl(environ)


def _check_presence(devices: Devices, needed: bool) -> Finding:
    if devices.failure is not None:
        return Finding(
            "GPUs", "problem", f"nvidia-smi: {devices.failure}", "have the driver of this machine looked at"
        )
    if not devices.gpus:
        advice = (
            "start the container with GPUs (docker run --gpus all; srun --gpus-per-node=8)" if needed else ""
        )
        return finding("GPUs", "none", problem=advice)
    kinds = sorted({f"{gpu.name} ({gpu.total_mib} MiB, driver {gpu.driver})" for gpu in devices.gpus})
    return finding(
        "GPUs",
        f"{len(devices.gpus)} x {' and '.join(kinds)}",
        warning="" if len(kinds) == 1 else "the slowest and the smallest decide: use GPUs of one kind",
    )


def _wrong_with(gpu: Gpu) -> Iterator[str]:
    if gpu.compute < 8:
        yield f"compute capability {gpu.compute:g} has no bf16 units: use 8.0 or newer"
    if gpu.used_mib > _BUSY_MIB:
        yield "another process uses it: choose a free one"
    if gpu.errors:
        yield f"{gpu.errors} uncorrected memory errors: have it looked at"


def links(topology: str) -> list[str]:
    """How each pair of GPUs is connected (NV18, PIX, SYS, ...), from the table of `nvidia-smi topo -m`."""
    rows = [line.split() for line in topology.splitlines() if line.startswith("GPU")]
    # Row k holds the connections of GPU k; the columns of the GPUs stand first, with an X for itself.
    return [row[1 + other] for number, row in enumerate(rows) for other in range(number + 1, len(rows))]


def _check_links(topology: str) -> Finding:
    found = links(topology)
    kinds = ", ".join(f"{found.count(kind)} pairs {kind}" for kind in sorted(set(found)))
    slow = [kind for kind in found if not kind.startswith("NV")]
    return finding(
        "GPU links",
        kinds or "unknown",
        warning="some pairs have no NVLink: keep model.tensor_model_parallel_size within those that do"
        if slow
        else "",
    )


def _check_network(devices: Devices) -> Finding:
    return finding(
        "network",
        ", ".join(devices.infiniband) or "no InfiniBand or RoCE adapter",
        warning=""
        if devices.infiniband
        else f"{devices.nodes} nodes talk over sockets: pass the adapters into the container",
    )


def _check_nccl(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"):
        if environ.get(name, "0") != "0":
            yield Finding(
                name, "warning", environ[name], f"takes a fast path away: unset {name} unless it is broken"
            )
