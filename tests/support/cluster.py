"""A SLURM cluster of this machine alone, with its own keys, folders and loopback ports; needs root."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

# Processes are told by their parents, without cgroups. A job that is put back into the queue may start again
# once its credential has expired.
_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={controller}
SlurmdPort={daemon}
SrunPortRange={first}-{last}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
ReturnToService=2
SlurmdTimeout=300
KillWait=5
MinJobAge=300
NodeName={host} NodeAddr=127.0.0.1 CPUs=64 State=UNKNOWN
PartitionName=tests Nodes={host} Default=YES
"""


def missing() -> str:
    """Why no cluster can be started here; empty where it can."""
    absent = [name for name in PROGRAMS if _find(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "SLURM's daemons need root"


def _find(name: str) -> str | None:
    return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")


class Cluster:
    """Started by `start`, ended by `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Raises RuntimeError where a daemon does not come up."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        controller, daemon, *ports = _free_ports(34)
        (self.folder / "slurm.conf").write_text(
            _CONFIG.format(
                host=socket.gethostname(), folder=self.folder, controller=controller, daemon=daemon,
                first=min(ports), last=max(ports),
            )
        )  # fmt: skip
        munge = {name: f"{self.folder}/munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge['socket']}",
            f"--pid-file={munge['pid']}", f"--log-file={munge['log']}", f"--seed-file={munge['seed']}",
        )  # fmt: skip
        self._wait(lambda: (self.folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-c")
        self._daemon("slurmd", "-D")
        self._wait(self._is_up)

    def stop(self) -> None:
        """Ends the jobs that still run, and the daemons, newest first, each by its process."""
        if all(each.poll() is None for each in self._daemons) and self._is_up():
            self.run("scancel", "--user=root", check=False)
            deadline = time.monotonic() + 20  # the daemon takes along no job that outlives it
            while self.run("squeue", "--noheader", check=False).strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for process in reversed(self._daemons):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _is_up(self) -> bool:
        states = self.run("sinfo", "--noheader", "--format=%T", check=False)
        return any(state in states for state in ("idle", "mixed", "allocated", "completing"))

    def run(self, *command: str, check: bool = True, **options) -> str:
        """What a client of SLURM prints."""
        options = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60} | options
        return subprocess.run(command, check=check, **options).stdout

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job."""
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, timeout_s: float = 240) -> dict[str, str]:
        """The job when it has ended for good. Raises TimeoutError where it does not."""
        deadline = time.monotonic() + timeout_s
        while (job := self.job(number))["JobState"] not in ENDED:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {number} is {job['JobState']} ({job['Reason']})")
            time.sleep(0.2)
        return job

    def _daemon(self, name: str, *arguments: str) -> None:
        with open(self.folder / f"{name}.output", "wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [_find(name), *arguments], env=self.environment, stdout=output, stderr=output,
                    stdin=subprocess.DEVNULL, start_new_session=True,
                )
            )  # fmt: skip

    def _wait(self, ready, timeout_s: float = 20) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline or any(each.poll() is not None for each in self._daemons):
                logs = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.output")]
                raise RuntimeError("SLURM does not come up:\n" + "\n".join(logs))
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
