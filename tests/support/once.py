"""Expensive answers that many tests share."""

from collections.abc import Callable
from types import TracebackType
from typing import Any


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but working once for the same arguments; what it returned or raised then, it does again.

    A layout that fails or hangs does so for many tests, and must not take its time for each.
    """
    results: dict[tuple, Any] = {}
    errors: dict[tuple, tuple[Exception, TracebackType | None]] = {}

    def call(*arguments: Any) -> Any:
        if arguments in errors:
            error, trace = errors[arguments]
            raise error.with_traceback(trace)
        if arguments not in results:
            try:
                results[arguments] = function(*arguments)
            except Exception as error:
                errors[arguments] = error, error.__traceback__
                raise
        return results[arguments]

    return call
