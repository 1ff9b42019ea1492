#!/usr/bin/env bash
# TEPO from nothing to a trained toy model on one CPU machine: environment, data, warm start, training at TP=2 on two
# processes, evaluation before and after, pictures, summary.
#
#   bash examples/quickstart_cpu.sh --output DIR [--seed N] [OVERRIDE ...]
#
# DIR becomes the run directory. Data and warm start are made once, in toy/, and serve later runs.
# Overrides go to `tepo-nemo train`, for example another layout:
#   hardware.devices_per_node=1 model.tensor_model_parallel_size=1
set -euo pipefail

usage() {
    echo "usage: bash examples/quickstart_cpu.sh --output DIR [--seed N] [OVERRIDE ...]" >&2
    exit 2
}

output="" seed=1 overrides=()
while [ $# -gt 0 ]; do
    case $1 in
        --output) [ $# -ge 2 ] || usage; output=$(realpath -m "$2"); shift 2 ;;
        --seed) [ $# -ge 2 ] || usage; seed=$2; shift 2 ;;
        -*) usage ;;
        *) overrides+=("$1"); shift ;;
    esac
done
[ -n "$output" ] || usage

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=examples/setup_cpu_env.sh
source examples/setup_cpu_env.sh

[ -e toy/train.jsonl ] || tepo-nemo prepare-data toy --output toy
[ -e toy/warm_start.nemo ] || python -W ignore examples/warm_start.py --output toy/warm_start.nemo
tepo-nemo train experiment=toy_cpu output="$output" seed="$seed" "${overrides[@]}"
tepo-nemo plot "$output" > /dev/null
python - "$output" <<'PYTHON'
import json
import sys
from pathlib import Path

run = Path(sys.argv[1])
summary = json.loads((run / "summary.json").read_text())
print(f"\n{summary['steps']} steps in {summary['wall_s']:.0f} s; accuracy on held-out problems, before and after:")
for name, before in summary["eval_before"].items():
    print(f"  {name:12s} {before:.3f} -> {summary['eval_after'][name]:.3f}")
print(f"metrics, samples, checkpoint: {run}\npictures: {run / 'plots'}")
PYTHON
