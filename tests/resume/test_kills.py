"""A handful of what kill_test.py does."""

from pathlib import Path

import pytest
from support.kills import Harrier, assert_same_run, killable_config
from support.resume_runs import run_here
from support.toy import ToyFolder
from support.worlds import Worlds

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("layout", "signals"), [({}, False), ({"tensor": 2}, True)], ids=["tp1 killed", "tp2 killed and stopped"]
)
def test_a_run_that_is_killed_again_and_again(
    worlds: Worlds, toy: ToyFolder, tmp_path: Path, layout: dict[str, int], signals: bool
) -> None:
    in_one = killable_config(toy, tmp_path / "in_one", 8, **layout)
    worlds(in_one.layout.world, stack="nemo").run(run_here, in_one, timeout=110)
    config = killable_config(toy, tmp_path / "killed", 8, **layout)
    harrier = Harrier(worlds, config, seed=3)
    harrier.harry(5, signals=signals, longest_s=1.5)
    assert_same_run(config, in_one)
    assert harrier.tally.total >= 2
