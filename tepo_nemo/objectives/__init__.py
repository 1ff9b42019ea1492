"""The mathematics: one module a method, and the parts that methods share.

Pure tensors: no collectives, no config, no wait for the device. To add a method, write a module here with a
registered `Objective` subclass, its preset in `configs/algorithm/` and its test, and say in
`tepo_nemo/config/options.py` what values a new option takes; a class outside of the package works too, by its
dotted path.
"""

from tepo_nemo.objectives.advantage import (
    AdvantageEstimator,
    group_advantages,
    overlong_penalty,
    zero_spread_fraction,
)
from tepo_nemo.objectives.contract import (
    Mean,
    MinibatchStatistics,
    MinibatchTotals,
    Objective,
    ObjectiveOutput,
    TokenBatch,
)
from tepo_nemo.objectives.registry import build, known, register
from tepo_nemo.objectives.rollout import RolloutTokens

__all__ = [
    "AdvantageEstimator",
    "Mean",
    "MinibatchStatistics",
    "MinibatchTotals",
    "Objective",
    "ObjectiveOutput",
    "RolloutTokens",
    "TokenBatch",
    "build",
    "group_advantages",
    "known",
    "overlong_penalty",
    "register",
    "zero_spread_fraction",
]
