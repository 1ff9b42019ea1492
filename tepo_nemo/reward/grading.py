"""Finding a reward function by name, and grading a batch with it."""

import importlib
import logging
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from tepo_nemo.errors import UserError
from tepo_nemo.reward.exact_answer import exact_answer
from tepo_nemo.reward.last_answer import last_answer
from tepo_nemo.reward.result import RewardResult

RewardFunction = Callable[[str, str, str, dict], RewardResult]  # prompt, response text, gold, metadata

REWARDS: dict[str, RewardFunction] = {"exact_answer": exact_answer, "last_answer": last_answer}

_log = logging.getLogger(__name__)


def load_reward(name: str) -> RewardFunction:
    """The reward function of a known name or of a dotted path (`package.module.function`).

    Raises:
        UserError: the name is unknown, or the path does not lead to something callable.
    """
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


def grade_batch(
    reward_function: RewardFunction, items: Sequence[tuple[str, str, str, dict]]
) -> list[RewardResult]:
    """Grades (prompt, response text, gold, metadata) items, in order.

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
        if not isinstance(result, RewardResult):
            raise UserError(
                f"the reward function returned {result!r:.200}; return a tepo_nemo.reward.result.RewardResult"
            )
        results.append(result)
    if failures:
        _log.error("the reward function failed on %d of %d responses", failures, len(items))
    return results
