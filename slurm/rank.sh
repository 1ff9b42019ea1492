#!/usr/bin/env bash
# Run one rank of a step, so that srun's exit code, the highest of all ranks, tells what ended the step.
#
# --kill-on-bad-exit ends the other ranks with SIGTERM when one has failed, and they may take that for a request to save
# and stop (3). So a failure counts more than that: 1 and 2 become 101 and 102. It also ends the ranks that are a little later
# than the first one to stop. So death by SIGTERM counts less: it becomes 1.
trap : USR1 TERM # SLURM signals every process of a step; the rank itself decides what to do
"$@"
code=$?
case $code in
    0 | 3) exit "$code" ;;
    143) exit 1 ;;
    *) exit "$((code < 100 ? code + 100 : code))" ;;
esac
