import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Records its arguments and variables, and ends as `answers` says for its name.
_STAND_IN = """\
#!/usr/bin/env python3
import json, os, sys
name = os.path.basename(sys.argv[0])
folder = os.path.dirname(sys.argv[0])
with open(folder + "/calls.jsonl", "a") as calls:
    calls.write(json.dumps([name, sys.argv[1:], dict(os.environ)]) + "\\n")
code, output = json.load(open(folder + "/answers.json"))[name]
print(output)
sys.exit(code)
"""


@dataclass
class StandIns:
    """SLURM's programs, as far as jobs call them."""

    folder: Path
    answers: dict[str, tuple[int, str]] = field(
        default_factory=lambda: {
            "srun": (0, "trained"),
            "sbatch": (0, "4711"),
            "scontrol": (0, "gpu003\ngpu004"),
            "squeue": (0, "RUNNING"),
        }
    )

    def run(
        self, script: Path | str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script as sbatch would: a copy elsewhere, in a job of two nodes."""
        self.answer()
        copy = self.folder / "slurm_script"
        copy.write_text(script.read_text() if isinstance(script, Path) else script)
        job = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": "gpu[003-004]",
            "TEPO_SLURM": str(REPOSITORY / "slurm"),
        }
        return subprocess.run(
            ["bash", str(copy), *arguments], env=job | environment, capture_output=True, text=True, timeout=30
        )

    def answer(self) -> None:
        """Take `answers` from now on, and forget the calls."""
        (self.folder / "answers.json").write_text(json.dumps(self.answers))
        (self.folder / "calls.jsonl").write_text("")

    def calls(self, name: str) -> list[tuple[list[str], dict[str, str]]]:
        """Arguments and variables of each call of a program."""
        lines = (self.folder / "calls.jsonl").read_text().splitlines()
        return [
            (arguments, environ) for called, arguments, environ in map(json.loads, lines) if called == name
        ]


@pytest.fixture
def stand_ins(tmp_path) -> StandIns:
    """Programs on PATH in place of SLURM's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    made = StandIns(folder)
    for name in made.answers:
        (folder / name).write_text(_STAND_IN)
        (folder / name).chmod(0o755)
    made.answer()
    return made
