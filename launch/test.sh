#!/usr/bin/env bash
# Lint and tests, from nothing.
#   bash launch/test.sh [pytest arguments]
# Two processes share the test files: where tests have several ranks, one waits while the other computes. More would not
# fit into a small machine's memory, since each has ranks of its own. `-n 0` runs all in one, as a debugger needs it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"
setup_env dev

"$VENV/bin/python" -m ruff check .
exec "$VENV/bin/python" -m pytest -n 2 --dist loadfile "$@"
