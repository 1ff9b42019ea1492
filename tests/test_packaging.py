"""What a non-editable installation holds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.toy_files import make_toy_files

REPOSITORY = Path(__file__).parents[1]


def test_an_installation_finds_its_presets(tmp_path):
    """Every YAML file of configs/ is in it, and the shipped experiment loads from there."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("tepo_nemo", "configs", "examples", "requirements", "slurm"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True, timeout=100)

    shipped = {path.relative_to(REPOSITORY / "configs") for path in (REPOSITORY / "configs").rglob("*.yaml")}
    installed = site / "tepo_nemo" / "configs"
    assert {path.relative_to(installed) for path in installed.rglob("*.yaml")} == shipped
    # What `tepo-nemo submit` and its jobs need.
    for name in ("slurm/tepo.sbatch", "slurm/run.sh", "slurm/rank.sh", "examples/train_tepo.py"):
        assert (site / "tepo_nemo" / name).is_file(), name
    make_toy_files(tmp_path)
    code = """
from tepo_nemo.config.load import load_config
from tepo_nemo.config.presets import config_folder
from tepo_nemo.launch.doctor.supported import supported
from tepo_nemo.launch.slurm import plan_job
config = load_config(["experiment=toy_cpu", "output=run"])
print(config_folder(), config.algorithm.name)
assert supported("cpu") and supported("container")
script = plan_job(config, [], time=None, jobs=1, seeds=None).script
assert f"TEPO_SLURM={config_folder().parent}/slurm" in script
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.split() == [str(installed), "tepo"]
