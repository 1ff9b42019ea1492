"""Kills a run at random moments and lets it go on, until it is done: nothing is lost, the end is the same.

    python tests/resume/kill_test.py --kills 60                      # SIGKILL
    python tests/resume/kill_test.py --kills 60 --signals            # SIGKILL, SIGTERM and SIGUSR1
    python tests/resume/kill_test.py --kills 60 --tensor 2 --data 2  # at another layout

Each process is ended within --longest seconds of its start: in its start-up, a rollout, an update, an
evaluation, a save or between them. After each, every checkpoint that has its name must be complete and as it
was written, and none may be lost. The last process is left alone; its weights, optimizer and metrics must be
those of a run that nothing has disturbed. Prints what was killed when. Not part of the test suite, which
runs a handful of the same (test_kills.py).
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.kills import Harrier, assert_same_run, killable_config  # noqa: E402
from support.resume_runs import run_here  # noqa: E402
from support.toy import make_toy_folder  # noqa: E402
from support.worlds import Worlds  # noqa: E402


def main() -> None:
    """Run the kills that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--signals", action="store_true", help="also SIGTERM and SIGUSR1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--longest", type=float, default=4.0, help="seconds that a process lives at most")
    for name in ("tensor", "pipeline", "data"):
        parser.add_argument(f"--{name}", type=int, default=1)
    arguments = parser.parse_args()
    layout = {name: getattr(arguments, name) for name in ("tensor", "pipeline", "data")}
    worlds, started = Worlds(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            (toy,) = worlds(1, stack="nemo").run(make_toy_folder, Path(folder))
            in_one = killable_config(toy, Path(folder) / "in_one", arguments.steps, **layout)
            worlds(in_one.layout.world, stack="nemo").run(run_here, in_one, timeout=600)
            config = killable_config(toy, Path(folder) / "killed", arguments.steps, **layout)
            harrier = Harrier(worlds, config, arguments.seed)
            harrier.harry(arguments.kills, signals=arguments.signals, longest_s=arguments.longest)
            assert_same_run(config, in_one)
        finally:
            worlds.close()
    tally = harrier.tally
    print(f"{tally.total} times ended early, {tally.processes} processes, {time.monotonic() - started:.0f} s")
    print("SIGKILL in " + ", ".join(f"{phase} {count}" for phase, count in tally.kills.most_common()))
    for (name, phase), count in sorted(tally.stops.items()):
        print(f"{name} in {phase}: {count}")
    if tally.stops:
        print(f"slowest stop, the saving of its state included: {tally.slowest_stop_s:.2f} s")
    print("no checkpoint lost, none broken; weights, optimizer and metrics are those of a run in one go")


if __name__ == "__main__":
    main()
