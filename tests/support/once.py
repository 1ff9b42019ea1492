"""Expensive answers that many tests share."""

from collections.abc import Callable
from typing import Any


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but working once for the same arguments; what it returned or raised then, it does again.

    A layout that fails or hangs does so for many tests, and must not take its time for each.
    """
    results: dict[tuple, Any] = {}

    def call(*arguments: Any) -> Any:
        if arguments not in results:
            try:
                results[arguments] = function(*arguments)
            except Exception as error:
                results[arguments] = error
        if isinstance(results[arguments], Exception):
            raise results[arguments]
        return results[arguments]

    return call
