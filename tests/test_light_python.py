"""The light layers on the Python of the NeMo container, without torch and the host."""

import os
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PYTHON = os.environ.get("TEPO_LIGHT_PYTHON", "")
TESTS = [
    "config/test_layout.py",
    "config/test_load.py",
    "config/test_refusals.py",
    "config/test_resume.py",
    "data",
    "launch",
    "planning",
    "reward",
    "runs",
    "slurm/test_submit.py",
    "test_architecture.py",
]
# These look into a heavy package, or start one in another process.
HEAVY = "test_hang or gpu_that_is_not_there or worker_has_nothing_of_the_training or impossible_characters"


@pytest.mark.skipif(
    not PYTHON, reason="no Python 3.12 was found (tests/run.sh names it in TEPO_LIGHT_PYTHON)"
)
@pytest.mark.timeout(400)
def test_light_layers_run_on_python_3_12():
    options = ["-q", "-p", "support.light_python", "-p", "no:cacheprovider", "-k", f"not ({HEAVY})"]
    ended = subprocess.run(
        [PYTHON, "-m", "pytest", *options, *(f"tests/{name}" for name in TESTS)],
        cwd=REPOSITORY,
        env={key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr
    assert int(re.search(r"(\d+) passed", ended.stdout)[1]) > 1000
