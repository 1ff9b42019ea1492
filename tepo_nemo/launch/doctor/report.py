"""All checks on this machine, as a table and as a page for a bug report."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tepo_nemo
from tepo_nemo.launch.doctor import devices, ranks
from tepo_nemo.launch.doctor.devices import Devices, check_devices, gather_devices
from tepo_nemo.launch.doctor.finding import Finding
from tepo_nemo.launch.doctor.packages import Packages, gather_packages
from tepo_nemo.launch.doctor.ranks import check_ranks
from tepo_nemo.launch.doctor.supported import light, supported
from tepo_nemo.launch.doctor.system import check_system, gather_system
from tepo_nemo.launch.doctor.traps import check_traps
from tepo_nemo.launch.doctor.versions import check_versions
from tepo_nemo.runs.tables import Table, to_markdown

# Nothing else of the environment is reported: it may hold passwords and tokens.
VARIABLES = (
    *ranks.VARIABLES,
    *devices.VARIABLES,
    "LANG",
    "LC_ALL",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
)


@dataclass(frozen=True)
class Examination:
    """The findings, and the facts that belong into a report."""

    findings: tuple[Finding, ...]
    packages: Packages
    devices: Devices
    environ: Mapping[str, str]  # those of VARIABLES that are set

    def count(self, state: str) -> int:
        """How many findings are in a state."""
        return sum(each.state == state for each in self.findings)


def examine(output: Path) -> Examination:
    """Look at this machine and check it; `output` is the run directory to be."""
    environ = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    packages, found = gather_packages(), gather_devices(environ)
    stack = packages.stack(gpus=bool(found.gpus))
    for_gpus = stack == "container"
    findings = (
        *check_versions(packages, stack, supported(stack), light()),
        *check_traps(packages, stack),
        check_ranks(environ),
        *check_devices(found, environ, needed=for_gpus),
        *check_system(gather_system(output), gpus=for_gpus, infiniband=bool(found.infiniband)),
    )
    return Examination(findings, packages, found, environ)


def findings_table(examination: Examination) -> Table:
    """What stands on the terminal; problems last, where the eye is when it is printed."""
    order = ("ok", "warning", "problem")
    rows = sorted(examination.findings, key=lambda each: order.index(each.state))
    return Table(
        "tepo-nemo doctor",
        ("check", "", "found", "what to do"),
        [(each.check, each.state, each.found, each.advice) for each in rows],
    )


def report_page(examination: Examination) -> str:
    """A page in Markdown with everything that a bug report needs, and no secret."""
    versions = examination.packages.versions
    page = to_markdown(
        "Environment of tepo_nemo",
        [
            _machine(),
            findings_table(examination),
            _table_of("Environment", ("variable", "value"), examination.environ),
            _table_of("Packages", ("package", "version"), versions),
        ],
    )
    topology = examination.devices.topology
    return page + (f"\n## Topology\n\n```\n{topology.rstrip()}\n```\n" if topology else "")


def _machine() -> Table:
    facts = {
        "tepo_nemo": tepo_nemo.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(os.cpu_count()),
    }
    return _table_of("Machine", ("", ""), facts)


def _table_of(title: str, columns: Sequence[str], facts: Mapping[str, str]) -> Table:
    return Table(title, columns, sorted(facts.items()))
