"""How often, and how far apart, anything is tried."""

from collections.abc import Iterator

from tepo_nemo.config.server import ServerConfig

_LONGEST_S = 60.0


def pauses(config: ServerConfig) -> Iterator[float]:
    """Seconds to wait before each try; 0 before the first."""
    yield 0.0
    for number in range(config.attempts - 1):
        yield min(config.backoff * 2**number, _LONGEST_S)
