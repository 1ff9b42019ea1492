"""The variables that torch.distributed reads, from those of SLURM where nobody else has set them."""

import re
from collections.abc import MutableMapping

from tepo_nemo.errors import UserError
from tepo_nemo.launch.local import free_port


def set_rank_variables(environ: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT where RANK is unset.

    torchrun and the local launcher set them all. Under `srun` they follow from SLURM's; a single process
    without any launcher is rank 0 of 1.
    """
    if "RANK" in environ:
        return
    if "SLURM_PROCID" in environ:
        environ["RANK"] = environ["SLURM_PROCID"]
        environ["WORLD_SIZE"] = environ["SLURM_NTASKS"]
        environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
        nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
        environ.setdefault("MASTER_ADDR", first_host(nodes))
        # The same for all ranks of a job, and seldom the same for two jobs on one machine.
        environ.setdefault("MASTER_PORT", str(20000 + int(environ["SLURM_JOB_ID"]) % 10000))
    else:
        environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        environ.setdefault("MASTER_ADDR", "127.0.0.1")
        environ.setdefault("MASTER_PORT", str(free_port()))


def first_host(nodes: str) -> str:
    """The first name of SLURM's list: `gpu[003-007,9],login` gives `gpu003`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise UserError(f"SLURM_JOB_NODELIST={nodes}: names no node (set MASTER_ADDR)")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
