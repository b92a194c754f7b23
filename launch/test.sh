#!/usr/bin/env bash
# Lint and tests, from nothing.
#   bash launch/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"
setup_env dev

"$VENV/bin/python" -m ruff check .
exec "$VENV/bin/python" -m pytest "$@"
