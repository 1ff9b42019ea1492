import os
from collections.abc import Iterator

import pytest
from support.worlds import Worlds

# Tests fork after tokenizers have been used, and the library would say so on the stderr that tests look at.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds(n, stack="torch"|"nemo").run(function, *arguments)`: see support/worlds.py."""
    session = Worlds()
    yield session
    session.close()
