"""Evaluate with ranks that srun or torchrun starts; `tepo-nemo eval` starts those of one machine itself.

    srun --ntasks-per-node=8 python examples/evaluate.py model.restore_from_path=MODEL.nemo data=math ...
    torchrun --nproc-per-node=2 examples/evaluate.py experiment=toy_cpu output=scores/toy

The arguments are Hydra overrides, see configs/README.md. Exit codes: 0 done, 1 failed, 2 a mistake in the
arguments or files, 3 stopped by a signal; the same command again goes on where it was stopped.
"""

import sys

from tepo_nemo.launch.rank import evaluate_from_overrides

if __name__ == "__main__":
    evaluate_from_overrides(sys.argv[1:])
