# Source this from the top of the repository: makes the virtual environment with the whole stack for a machine without a
# GPU where it is missing or out of date, and activates it. TEPO_VENV names its folder (default: .venv).
#
# PyTorch comes from wherever pip is set up to look. On a machine where that is a build for GPUs, name an index with builds
# for CPUs in PIP_INDEX_URL or PIP_EXTRA_INDEX_URL to save the download of the GPU libraries.

if ! command -v python3.11 > /dev/null; then
    echo "python3.11 is needed on PATH (NeMo 2.2 and the pinned packages are for Python 3.11)" >&2
    exit 2
fi
TEPO_VENV=${TEPO_VENV:-.venv}
tepo_stamp=$(cat requirements/cpu.txt setup.py pyproject.toml | sha256sum | cut -d " " -f 1)
if [ "$(cat "$TEPO_VENV/tepo_requirements.sha256" 2> /dev/null)" != "$tepo_stamp" ]; then
    echo "installing the CPU stack into $TEPO_VENV" >&2
    python3.11 -m venv "$TEPO_VENV"
    # PyTorch with its own dependencies, since a build for GPUs has more of them; the rest is exactly the list.
    "$TEPO_VENV/bin/python" -m pip install --quiet --constraint requirements/cpu.txt torch setuptools
    "$TEPO_VENV/bin/python" -m pip install --quiet --no-deps --requirement requirements/cpu.txt
    "$TEPO_VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
    echo "$tepo_stamp" > "$TEPO_VENV/tepo_requirements.sha256"
fi
# shellcheck source=/dev/null
source "$TEPO_VENV/bin/activate"
