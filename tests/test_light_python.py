"""The light layers on the Python of the NeMo container, without torch and the host."""

import os
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PYTHON = os.environ.get("TEPO_LIGHT_PYTHON", "")
FOLDERS = ["config", "data", "launch", "planning", "reward", "runs", "slurm", "test_architecture.py"]
# These need a heavy package in another process, or look for all of requirements/cpu.txt.
LEFT_OUT = (
    "gpu_that_is_not_there or worker_has_nothing_of_the_training or read_by_nemo or impossible_characters"
)


@pytest.mark.skipif(
    not PYTHON, reason="no Python 3.12 was found (tests/run.sh names it in TEPO_LIGHT_PYTHON)"
)
@pytest.mark.timeout(300)
def test_light_layers_run_on_python_3_12():
    tests = [f"tests/{name}" for name in FOLDERS if (REPOSITORY / "tests" / name).exists()]
    ended = subprocess.run(
        [PYTHON, "-m", "pytest", "-q", "-p", "support.light_python", "-p", "no:cacheprovider",
         "--ignore=tests/slurm/test_cluster.py", "-k", f"not ({LEFT_OUT})", *tests],
        cwd=REPOSITORY,
        env={key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr
    assert int(re.search(r"(\d+) passed", ended.stdout)[1]) > 1000
