"""Finding a reward by name, and grading a batch with it."""

import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial, update_wrapper

from tepo_nemo.errors import UserError
from tepo_nemo.reward.composition import WeightedSum
from tepo_nemo.reward.exact_answer import exact_answer
from tepo_nemo.reward.last_answer import last_answer
from tepo_nemo.reward.math_answer import math_answer
from tepo_nemo.reward.result import RewardFunction, RewardResult
from tepo_nemo.reward.shape import boxed, short, thinks_first

REWARDS: dict[str, RewardFunction] = {
    "exact_answer": exact_answer,
    "last_answer": last_answer,
    "math_answer": math_answer,
    "boxed": boxed,
    "thinks_first": thinks_first,
    "short": short,
}

RewardSpec = str | Sequence[tuple[str, float, Mapping]]  # a name, or parts: name, weight, options

_log = logging.getLogger(__name__)


def load_reward(reward: RewardSpec) -> RewardFunction:
    """The reward of a known name or of a dotted path (`package.module.function`), or the sum of several.

    Raises:
        UserError: a name is unknown, a path does not lead to something callable, or a function does not take
            its options.
    """
    if isinstance(reward, str):
        return _load(reward)
    return WeightedSum([(_with_options(name, options), weight) for name, weight, options in reward])


def _with_options(name: str, options: Mapping) -> RewardFunction:
    function = _load(name)
    if not options:
        return function
    known = {
        key for key, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }  # fmt: skip
    if unknown := sorted(options.keys() - known):
        raise UserError(
            f"data.reward: {name} has no option {unknown[0]}; it has {', '.join(sorted(known)) or 'none'} "
            "(keyword-only parameters)"
        )
    return update_wrapper(partial(function, **options), function)


def _load(name: str) -> RewardFunction:
    if name in REWARDS:
        return REWARDS[name]
    module_name, _, function_name = name.rpartition(".")
    if not module_name:
        nearest = get_close_matches(name, REWARDS, n=1, cutoff=0.0)[0]
        raise UserError(
            f"data.reward={name} is unknown; did you mean {nearest}? Known: {', '.join(sorted(REWARDS))}; "
            "or give the dotted path of your own function"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # importing runs the user's own code, which may raise anything
        raise UserError(
            f"data.reward={name} cannot be imported ({type(error).__name__}: {error}); "
            "give package.module.function and put the package on PYTHONPATH"
        ) from error
    if not callable(function):
        raise UserError(f"data.reward={name} is a {type(function).__name__}; give the path of a function")
    return function


def check_result(result: object) -> RewardResult:
    """Raises UserError where a reward function returned something else."""
    if not isinstance(result, RewardResult):
        raise UserError(
            f"the reward function returned {result!r:.200}; return a tepo_nemo.reward.result.RewardResult"
        )
    return result


def grade_batch(
    reward_function: RewardFunction, items: Sequence[tuple[str, str, str, dict]]
) -> list[RewardResult]:
    """Grades (prompt, response text, gold, metadata) items, in order, in this process.

    An exception of the reward function becomes a result with status `error`: the response is masked, not
    punished. The first exception of a batch is logged with its traceback.

    Raises:
        UserError: raised by the reward function (the data is wrong), or it returns no RewardResult.
    """
    results: list[RewardResult] = []
    failures = 0
    for prompt, response_text, gold, metadata in items:
        try:
            result = reward_function(prompt, response_text, gold, metadata)
        except UserError:
            raise
        except Exception:
            failures += 1
            if failures == 1:
                _log.exception("the reward function failed on the response %.200r", response_text)
            result = RewardResult(0.0, "error")
        results.append(check_result(result))
    if failures:
        _log.error("the reward function failed on %d of %d responses", failures, len(items))
    return results
