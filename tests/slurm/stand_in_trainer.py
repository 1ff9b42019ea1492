"""A trainer without a model that does what jobs rely on: ends with 3, its state saved, and goes on from it.

`output=DIR` and `seed=N` are read of the overrides. STAND_IN says what happens: it `trains`, `waits` for a
signal before it goes on for the first time, `dies` at rank 1, or is `endless`: stops itself every few steps.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS, STEP_S = 40, 0.1


def main() -> int:
    rank = int(os.environ["SLURM_PROCID"])
    chosen = dict(override.split("=", 1) for override in sys.argv[1:])
    folder = Path(chosen["output"].strip("'"))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank_{rank}.json"
    state = (
        json.loads(file.read_text())
        if file.exists()
        else {"step": 0, "value": int(chosen["seed"]), "starts": 0}
    )
    state["starts"] += 1
    asked = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    waits = os.environ["STAND_IN"] == "waits" and state["starts"] == 1
    while state["step"] < STEPS:
        if not (waits and state["step"] == 5):
            state["step"] += 1
            state["value"] = state["value"] * 31 % 1_000_003
        file.with_suffix(".progress").write_text(str(state["step"]))
        time.sleep(STEP_S)
        if os.environ["STAND_IN"] == "dies" and rank == 1 and state["step"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if asked or (os.environ["STAND_IN"] == "endless" and state["step"] % 5 == 0):
            file.write_text(json.dumps(state))
            return 3
    file.write_text(json.dumps(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())
