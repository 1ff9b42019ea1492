"""What the tests of checkpoints share."""

import pytest
from support.toy import ToyFolder, make_toy_folder
from support.worlds import Worlds


@pytest.fixture(scope="session")
def toy(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> ToyFolder:
    (folder,) = worlds(1, stack="nemo").run(make_toy_folder, tmp_path_factory.mktemp("resume"))
    return folder
