"""`tepo-nemo submit`"""

import argparse

from tepo_nemo.commands.parser import OVERRIDES, Subparsers, add_command, count
from tepo_nemo.launch.outcome import ExitCode

_JOBS = """jobs:
  hardware.nodes and hardware.devices_per_node are the nodes and the ranks of each. The script is
  slurm/tepo.sbatch, or slurm/tepo_cpu.sbatch for hardware=cpu; slurm/env.sh holds the settings of your site.
  --time is by default that of the script or, with trainer.max_time, what leaves room to save after it.
  A job that is stopped with its state saved goes back into the queue; with --jobs N the next of N goes on.
"""


def add(commands: Subparsers) -> None:
    """Add the command and its arguments."""
    submit = add_command(
        commands, "submit", _run, "submit the SLURM job of a configuration",
        "tepo-nemo submit model=qwen2_5_7b hardware=h100x16 output=/scratch/me/run --dry-run",
        "tepo-nemo submit experiment=toy_cpu output=runs/toy --time 00:30:00",
        "tepo-nemo submit model=qwen2_5_7b hardware=h100x8 output=/scratch/me/run --jobs 4",
        "tepo-nemo submit model=qwen2_5_7b hardware=h100x8 output=/scratch/me/seeds --array 1,2,3",
        details=OVERRIDES + _JOBS,
    )  # fmt: skip
    submit.add_argument("--dry-run", action="store_true", help="print the script and the sbatch line alone")
    submit.add_argument("--time", metavar="TIME", help="limit of one job, D-HH:MM:SS (see below)")
    submit.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="a chain of N jobs, one after the other"
    )
    submit.add_argument("--array", metavar="SEEDS", help="one run a seed, each in output/seed_SEED: 1,2,3")
    submit.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="see below")


def _run(arguments: argparse.Namespace) -> int:
    from tepo_nemo.config.load import load_config
    from tepo_nemo.launch.mounts import check_mounts
    from tepo_nemo.launch.slurm import plan_job, shown, submit
    from tepo_nemo.reward.grading import load_reward

    config = load_config(arguments.overrides)
    load_reward(config.data.reward_parts)
    check_mounts(config)
    job = plan_job(
        config, arguments.overrides, time=arguments.time, jobs=arguments.jobs, seeds=arguments.array
    )
    if arguments.dry_run:
        print(shown(job), end="")
    else:
        print(f"submitted {' '.join(submit(job))}, log {job.log}")
    return ExitCode.DONE
