# shellcheck shell=bash
# Source this from the top of the repository: where a Python 3.12 is found, which is that of the NeMo container, makes an
# environment with the light packages alone (setup.py) and names its Python in TEPO_LIGHT_PYTHON.
for python in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3.12; do
    "$python" -c "import venv" 2> /dev/null || continue
    tepo_light=${TEPO_VENV:-.venv}-light
    tepo_light_stamp=$(cat setup.py pyproject.toml | sha256sum | cut -d " " -f 1)
    if [ "$(cat "$tepo_light/tepo_requirements.sha256" 2> /dev/null)" != "$tepo_light_stamp" ]; then
        echo "installing the light packages for Python 3.12 into $tepo_light" >&2
        "$python" -m venv "$tepo_light"
        "$tepo_light/bin/python" -m pip install --quiet "setuptools>=64"
        "$tepo_light/bin/python" -m pip install --quiet --no-build-isolation --editable ".[parquet,test]"
        echo "$tepo_light_stamp" > "$tepo_light/tepo_requirements.sha256"
    fi
    TEPO_LIGHT_PYTHON=$(realpath --no-symlinks "$tepo_light/bin/python")
    export TEPO_LIGHT_PYTHON
    break
done
