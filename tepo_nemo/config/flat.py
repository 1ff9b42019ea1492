"""A configuration as one level of dotted keys, so that two can be compared."""

from collections.abc import Iterator
from typing import Any

from tepo_nemo.config.schema import Config


def flat(config: Config, *, without_defaults: bool = False) -> dict[str, Any]:
    """Dotted key -> value as in JSON; the items of a list are numbered."""
    return dict(_leaves("", config.model_dump(mode="json", exclude_defaults=without_defaults)))


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not parts:
        yield key, value
    for name, part in parts:
        yield from _leaves(f"{key}.{name}" if key else str(name), part)
