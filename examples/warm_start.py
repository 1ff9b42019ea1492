"""Make the model that an embedded task starts from: next-token training on a careless student's answers.

    python examples/warm_start.py --output toy/warm_start.nemo
    python examples/warm_start.py --task chain --output chain/warm_start.nemo

Runs as one process, on the CPU; the configuration is that of `experiment=TASK_cpu`, further arguments are
Hydra overrides. Exit codes as for `tepo-nemo`.
"""

import argparse
import os
from pathlib import Path

from rich.progress import Progress

from tepo_nemo.config.load import load_config
from tepo_nemo.launch.rank import end_with, prepare_devices
from tepo_nemo.launch.scheduler import set_rank_variables

ONE_PROCESS = (
    "hardware.devices_per_node=1",
    "model.tensor_model_parallel_size=1",
    "model.restore_from_path=null",
    "trainer.optimizer.learning_rate=1e-3",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task", choices=("toy", "chain"), default="toy", help="what to teach (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the .nemo file to write")
    parser.add_argument("--steps", type=int, default=500, help="updates (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=128, help="problems an update (default: %(default)s)"
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="Hydra overrides")
    arguments = parser.parse_args()
    task = (f"experiment={arguments.task}_cpu", f"data.train={arguments.task}/warm_start.jsonl")
    config = load_config([*task, *ONE_PROCESS, *arguments.overrides])
    set_rank_variables(os.environ)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # saving forks, and the library would say so
    prepare_devices(config)
    from nemo.utils import logging

    logging.setLevel(logging.ERROR)  # NeMo tells every key that its configuration leaves at the default
    from tepo_nemo.nemo.warm_start import warm_start

    with Progress(transient=True) as progress:
        bar = progress.add_task("warm start", total=arguments.steps)

        def report(step: int, loss: float) -> None:
            progress.update(bar, completed=step)
            if step % 100 == 0:
                progress.console.print(
                    f"warm start  step {step}/{arguments.steps}  loss {loss:.3f} nats a token"
                )

        warm_start(
            config, arguments.output, steps=arguments.steps, batch_size=arguments.batch_size, report=report
        )


if __name__ == "__main__":
    end_with(main)
