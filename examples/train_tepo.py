"""Train with ranks that srun or torchrun starts; `tepo-nemo train` starts those of one machine itself.

    srun --ntasks-per-node=8 python examples/train_tepo.py hardware.nodes=4 hardware.devices_per_node=8 ...
    torchrun --nproc-per-node=2 examples/train_tepo.py experiment=toy_cpu output=runs/toy

The arguments are Hydra overrides, see configs/README.md. Exit codes: 0 done, 1 failed, 2 a mistake in the
arguments or files, 3 stopped by a signal with the state saved.
"""

import sys

from tepo_nemo.launch.rank import train_from_overrides

if __name__ == "__main__":
    train_from_overrides(sys.argv[1:])
