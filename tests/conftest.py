from collections.abc import Iterator

import pytest
from support.worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(n, stack="torch"|"nemo").run(function, *arguments)`: see support/worlds.py."""
    session = Worlds()
    yield session
    session.close()
