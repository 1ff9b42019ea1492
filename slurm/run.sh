# shellcheck shell=bash
# What the jobs of this folder share: where the ranks meet, how they are started, and what becomes of the job when they end.
# Sourced after env.sh.

# One line in the log of the job.
tepo_say() {
    echo "tepo-nemo: job ${SLURM_JOB_ID}: $*" >&2
}

# Where the ranks meet: the first node, and a port that two jobs on a node seldom share.
tepo_rendezvous() {
    read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
    export MASTER_ADDR MASTER_PORT
}

# What the ranks find in their environment. Packages of the user's home would come before those of the container.
tepo_environment() {
    export PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1
    local code=$TEPO_CODE
    # A package that is installed is found from the folder above it.
    [ ! -e "$code/__init__.py" ] || code=$(dirname "$code")
    export PYTHONPATH=$code${TEPO_PACKAGES:+:$TEPO_PACKAGES/site}${PYTHONPATH:+:$PYTHONPATH}
}

# Start a command as a step of this job: tepo_step [OPTION OF SRUN ...] -- COMMAND [ARGUMENT ...]
# Returns 0 or 3 where all ranks ended so, and else how the one ended that pulled the others down.
tepo_step() {
    local options=(--mpi="$TEPO_MPI" --kill-on-bad-exit=1 --cpu-bind=none)
    if [ -n "$TEPO_IMAGE" ]; then
        local mounts=$TEPO_MOUNTS folder
        for folder in "$TEPO_CODE" "$TEPO_PACKAGES"; do
            # A folder of the image alone is not on the host.
            [ ! -d "$folder" ] || mounts+=,$folder:$folder
        done
        options+=(--container-image="$TEPO_IMAGE" --container-mounts="$mounts" --container-workdir="$(pwd -P)"
            --no-container-mount-home)
    fi
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    local code=0
    srun "${options[@]}" bash "$TEPO_CODE/slurm/rank.sh" "$@" || code=$?
    case $code in
        1) return 143 ;;
        101 | 102) return "$((code - 100))" ;;
        *) return "$code" ;;
    esac
}

# Install what the image lacks, once.
tepo_install() {
    [ -n "$TEPO_PACKAGES" ] || return 0
    mkdir -p "$TEPO_PACKAGES"
    tepo_step --nodes=1 --ntasks=1 -- bash "$TEPO_CODE/slurm/install.sh" "$TEPO_PACKAGES"
}

# What becomes of a job whose ranks have ended: tepo_decide CODE RESTARTS prints requeue, next or end.
# Only 3 says that the run was stopped with its state saved; after 1 and 2 it would end the same way again.
tepo_decide() {
    if [ "$1" -ne 3 ]; then
        echo end
    elif [ "$TEPO_ON_STOP" = requeue ] && [ "$2" -ge "$TEPO_MAX_REQUEUES" ]; then
        echo end
    else
        echo "$TEPO_ON_STOP"
    fi
}

# Train, or evaluate, and end the job: tepo_run ENTRY [OVERRIDE ...], ENTRY being a file of examples/.
tepo_run() {
    local entry=$1 code=0 restarts=${SLURM_RESTART_COUNT:-0}
    shift
    # SLURM counts its own requeues too, after preemption and lost nodes.
    if [ "$restarts" -gt "$TEPO_MAX_REQUEUES" ]; then
        tepo_say "requeued $restarts times, TEPO_MAX_REQUEUES=$TEPO_MAX_REQUEUES (submit it again to go on)"
        exit 3
    fi
    tepo_rendezvous
    tepo_environment
    tepo_install || exit
    # SLURM signals the ranks, which save their state; this script has to outlive them to see how they end.
    trap : USR1 TERM
    tepo_step --label -- "$TEPO_PYTHON" "$TEPO_CODE/examples/$entry" "$@" || code=$?
    tepo_end "$code" "$restarts"
}

# End the job as its ranks have ended: tepo_end CODE RESTARTS
tepo_end() {
    local decision
    decision=$(tepo_decide "$1" "$2")
    case $decision in
        requeue)
            # A job that the user or the time limit has ended is no longer running, and stays ended.
            if [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" != RUNNING ]; then
                tepo_say "stopped, its state saved (submit it again to go on)"
            elif scontrol requeue "$SLURM_JOB_ID"; then
                tepo_say "stopped, its state saved; requeued ($(($2 + 1)) of at most $TEPO_MAX_REQUEUES)"
            else
                tepo_say "stopped, its state saved, but not requeued (submit it again to go on)"
            fi
            ;;
        next)
            tepo_say "stopped, its state saved; the next job of the chain goes on"
            exit 0
            ;;
        end)
            [ "$1" -ne 3 ] || tepo_say "stopped, its state saved (submit it again to go on)"
            ;;
    esac
    exit "$1"
}

# The run directory that overrides name, without the quotes that are Hydra's.
tepo_output() {
    local argument output=""
    for argument in "$@"; do
        [[ $argument != output=* ]] || output=${argument#output=}
    done
    if [ -z "$output" ]; then
        tepo_say "this job needs output=DIR"
        return 2
    fi
    echo "${output//[\'\"]/}"
}

# The overrides of one task of `--array=SEEDS`: TEPO_OVERRIDES, with its seed and a run directory of its own.
tepo_overrides() {
    local output
    TEPO_OVERRIDES=("$@")
    [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || return 0
    output=$(tepo_output "$@") || exit
    TEPO_OVERRIDES+=("seed=$SLURM_ARRAY_TASK_ID" "output='$output/seed_$SLURM_ARRAY_TASK_ID'")
}
