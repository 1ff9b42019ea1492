#!/usr/bin/env bash
# Set up the CPU environment (once) and run the tests; arguments go to pytest.
#
#   bash tests/run.sh [-k NAME] [...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/light_env.sh
source tests/light_env.sh
# shellcheck source=examples/setup_cpu_env.sh
source examples/setup_cpu_env.sh
exec python -m pytest tests "$@"
