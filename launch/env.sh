# Set-up that the other scripts share; source it. It defines ROOT and VENV, and setup_env, which makes the virtual
# environment VENV and installs the package there, editable.
#
#   HYBRIDFLOW_VENV    where the environment lies (default: .venv in the repository)
#   HYBRIDFLOW_TORCH   the torch to install where there is no GPU (default: torch==2.13.0)
#
# Installing again is skipped while setup.py, the Python and the extra are the same as last time.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${HYBRIDFLOW_VENV:-$ROOT/.venv}"

# One thread a process: the ranks share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Some reasoning-gym tasks go through sets: the same hashes on every rank, and from run to run.
export PYTHONHASHSEED="${PYTHONHASHSEED:-0}"
# Models and data are local; no library may wait for a hub.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"

# Prints the first Python that is new enough and can make environments.
find_python() {
    local python
    for python in python3.11 python3.12 python3.13 python3.10 python3; do
        if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            echo "$python"
            return
        fi
    done
    echo "no Python of version 3.10 or newer with venv was found" >&2
    return 1
}

# setup_env [EXTRA]: EXTRA is an extra of setup.py, such as dev.
setup_env() {
    local extra="${1:-}" python stamp wanted
    if [[ ! -x "$VENV/bin/python" ]]; then
        python="$(find_python)"
        echo "making $VENV with $("$python" --version)"
        "$python" -m venv "$VENV"
    fi
    stamp="$VENV/installed-${extra:-base}"
    wanted="$(cat "$ROOT/setup.py" "$ROOT/pyproject.toml" | sha256sum | cut -d ' ' -f 1) $ROOT"
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
        return
    fi
    # Before the package, whose plain `torch` would bring gigabytes of CUDA.
    if ! command -v nvidia-smi >/dev/null 2>&1; then
        "$VENV/bin/python" -m pip install --quiet "${HYBRIDFLOW_TORCH:-torch==2.13.0}"
    fi
    "$VENV/bin/python" -m pip install --quiet --editable "$ROOT${extra:+[$extra]}"
    echo "$wanted" >"$stamp"
}
