"""Whether MPI and torch.distributed would number the processes alike."""

from collections.abc import Mapping

from tepo_nemo.launch.doctor.finding import Finding

VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE",
)  # fmt: skip
"""What launchers set, as far as it is looked at or reported."""
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_START = "start the ranks with `srun --mpi=pmix`"


def check_ranks(environ: Mapping[str, str]) -> Finding:
    """TensorRT-LLM asserts that the MPI rank is the torch rank, and fails without a word where it is not.

    Args:
        environ: has those of `VARIABLES` that are set.
    """
    torch_rank = environ.get("RANK") or environ.get("SLURM_PROCID")
    mpi_name = next((name for name in _MPI_RANKS if name in environ), None)
    if torch_rank is None and mpi_name is None:
        return Finding("ranks", "ok", "no launcher has started this process")
    if mpi_name is None:
        return Finding(
            "ranks", "warning", f"torch rank {torch_rank}, no MPI rank", f"TensorRT-LLM needs one: {_START}"
        )
    found = f"torch rank {torch_rank or 'unset'}, {mpi_name}={environ[mpi_name]}"
    if torch_rank is None:
        return Finding("ranks", "problem", found, f"set RANK and WORLD_SIZE from MPI's, or {_START}")
    if torch_rank != environ[mpi_name]:
        return Finding(
            "ranks", "problem", found, f"TensorRT-LLM needs equal ranks: {_START} and leave RANK unset"
        )
    return Finding("ranks", "ok", found)
