# shellcheck shell=bash
# The settings of your site. Every job sources this file, and so does `tepo-nemo submit` before it calls sbatch. Edit it, or
# set the variables in your environment, which sbatch passes on: what is set there counts.

# Where jobs go. sbatch reads these two itself; unset, the cluster decides.
# export SBATCH_ACCOUNT=my_account
# export SBATCH_PARTITION=my_partition

# The container of the ranks, as pyxis takes it: a registry's name (with # after the host) or, which starts faster, a
# squashfs file made by `enroot import docker://nvcr.io#nvidia/nemo:25.02`. Empty: no container, the Python on PATH.
export TEPO_IMAGE=${TEPO_IMAGE-nvcr.io#nvidia/nemo:25.02}

# Folders that the ranks see, as SOURCE:TARGET,SOURCE:TARGET: data, models, tokenizers and run directories must lie in
# them. The default is the folder where sbatch was called. The code of tepo_nemo is mounted besides.
export TEPO_MOUNTS=${TEPO_MOUNTS:-$(pwd -P):$(pwd -P)}

# The code, a checkout or an installed package, under its path in the container. An image of slurm/Dockerfile has it in
# /opt/tepo_nemo.
export TEPO_CODE=${TEPO_CODE:-$(dirname "$TEPO_SLURM")}

# For an image without the light packages of tepo_nemo: a folder on a file system of all nodes. The first job installs
# them there (slurm/install.sh), which needs a package index in reach of the nodes. Empty: the image has them.
export TEPO_PACKAGES=${TEPO_PACKAGES-}

# How srun tells the ranks of each other; TensorRT-LLM needs MPI. `srun --mpi=list` says what the cluster has.
export TEPO_MPI=${TEPO_MPI:-pmix}

# How often a job that was stopped with its state saved may put itself back into the queue.
export TEPO_MAX_REQUEUES=${TEPO_MAX_REQUEUES:-20}

# The Python of the ranks.
export TEPO_PYTHON=${TEPO_PYTHON:-python}
