#!/usr/bin/env bash
# Install what a NeMo container lacks of tepo_nemo's light requirements, in the versions of requirements/cpu.txt. Nothing that
# the container has is replaced: packages are installed without their dependencies, which the list holds too.
#   bash slurm/install.sh            into the Python of the container, with tepo_nemo itself (Dockerfile)
#   bash slurm/install.sh FOLDER     into FOLDER/site, for PYTHONPATH; does nothing where that is there
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${TEPO_PYTHON:-python}

# The names of the section of cpu.txt, one a line, that importlib does not find.
missing() {
    "$python" - "$top/requirements/cpu.txt" << 'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

text = open(sys.argv[1], encoding="utf-8").read()
section = text.split("# tepo_nemo's own light requirements\n")[1].split("\n\n")[0]
for line in section.splitlines():
    pin = line.split("#")[0].strip()
    try:
        version(pin.split("==")[0])
    except PackageNotFoundError:
        print(pin)
PYTHON
}

list=$(missing)
mapfile -t pins <<< "$list"
[ -n "$list" ] || pins=()
# Some containers constrain pip to what they hold, which refuses every pin.
export PIP_CONSTRAINT=
if [ $# -eq 0 ]; then
    "$python" -m pip install --no-deps --no-build-isolation "${pins[@]}" "$top"
    exit
fi
[ ! -e "$1/site" ] || exit 0
# Beside it first, since jobs may do this at the same time; the first one to end has made it.
partial=$(mktemp -d "$1/partial.XXXXXX")
[ ${#pins[@]} -eq 0 ] || "$python" -m pip install --no-deps --target "$partial" "${pins[@]}"
chmod 755 "$partial"
mv -T --no-clobber "$partial" "$1/site"
rm -rf "$partial"
