"""A rank that hangs: all end, the line names it, and its log shows where it hangs. In real gloo ranks."""

import sys
from pathlib import Path

from tepo_nemo.launch.local import run_ranks
from tepo_nemo.launch.outcome import ExitCode

TIMEOUT_S = 3
SCRIPT = f"""
import datetime, os, time
import torch, torch.distributed as dist
from tepo_nemo.launch.rank import end_with
from tepo_nemo.nemo.hangs import StackWatch, naming_hung_ranks

def asleep_for_good():
    time.sleep(3600)

def train():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={TIMEOUT_S}))
    watch = StackWatch({TIMEOUT_S})
    with naming_hung_ranks():
        for update in range(3):
            watch.moved()
            if update == 2 and dist.get_rank() == 1:
                asleep_for_good()
            dist.all_reduce(torch.ones(1))
            print("update", update, flush=True)

end_with(train)
"""


def test_a_sleeping_rank_is_named_and_shown(tmp_path: Path, capfd) -> None:
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    assert run_ranks(command, ranks=3, logs=tmp_path, grace_s=1.0) == ExitCode.FAILED
    (line,) = capfd.readouterr().err.splitlines()
    assert "HungRankError: rank 1 did not come to a collective operation" in line
    logs = [(tmp_path / f"rank_{rank}.log").read_text() for rank in range(3)]
    for log in logs:  # each rank shows where it stands
        assert "update 1" in log and "update 2" not in log and "Timeout (0:00:02" in log
    assert "asleep_for_good" in logs[1] and "asleep_for_good" not in logs[0]
    assert all("all_reduce" in logs[rank] for rank in (0, 2))
