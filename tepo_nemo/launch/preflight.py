"""What can be found wrong before a single rank is started."""

from tepo_nemo.config.schema import Config
from tepo_nemo.data.prompts import load_prompts
from tepo_nemo.reward.grading import load_reward
from tepo_nemo.runs.trackers import check_trackers


def check_run(config: Config) -> None:
    """Build the objective, find the reward function, the trackers and the rollouts of a replay, and read the
    prompt sets of a checked configuration.

    Raises UserError on the first mistake. Imports torch, for the objective.
    """
    from tepo_nemo.objectives.registry import build
    from tepo_nemo.training.replay import read_dumps

    build(config.algorithm.name, config.algorithm.options)
    load_reward(config.data.reward_parts)
    for path in (config.data.train, *(benchmark.path for benchmark in config.data.evaluation)):
        load_prompts(path)
    check_trackers(config.trainer.trackers)
    if config.replay is not None:
        read_dumps(config.replay)
