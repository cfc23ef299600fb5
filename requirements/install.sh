#!/usr/bin/env bash
# Makes a virtual environment with everything that runs without a GPU, and compiles csrc/.
# usage: requirements/install.sh VENV [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:?usage: requirements/install.sh VENV [PYTHON]}
wanted=${2:-}

fail() {
    echo "setup: $1" >&2
    exit 1
}

# One a line, best first. Not all of them exist or run: pyenv's shim python3.12 may have no version behind it.
candidates() {
    if [ -n "$wanted" ]; then
        echo "$wanted"
        return
    fi
    printf '%s\n' python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python
    uv python find --system 3.12 2>/dev/null || true
}

# Prints "ok" or what this Python lacks; fails if it is no Python 3.12.
examine() {
    "$1" -c '
import importlib.util, pathlib, sys, sysconfig
if sys.version_info[:2] != (3, 12):
    sys.exit(1)
if not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
    print("has no venv module; install it (Ubuntu: apt-get install python3.12-venv)")
elif not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists():
    print("has no headers (Python.h); install them (Ubuntu: apt-get install python3.12-dev)")
else:
    print("ok")' 2>/dev/null
}

find_python() {
    local candidate state lacking=
    while read -r candidate; do
        state=$(examine "$candidate") || continue
        if [ "$state" = ok ]; then
            echo "$candidate"
            return
        fi
        lacking=${lacking:-$candidate $state}
    done < <(candidates)
    [ -z "$lacking" ] || fail "$lacking"
    [ -z "$wanted" ] || fail "$wanted does not run or is not Python 3.12; set PYTHON=/path/to/python3.12"
    fail "no Python 3.12 was found; install one (uv python install 3.12, or pyenv install 3.12) or set PYTHON="
}

python=$(find_python)
command -v "${CXX:-c++}" >/dev/null ||
    fail "no C++ compiler (${CXX:-c++}) was found; install one (Debian: apt-get install g++) or set CXX="
[ "$(uname -sm)" = "Linux x86_64" ] || fail "only Linux on x86-64 is supported, this is $(uname -sm)"
[ ! -e "$venv/bin/python" ] || examine "$venv/bin/python" >/dev/null ||
    fail "$venv is not of Python 3.12; remove it, then run this again"

step() { echo "[$((SECONDS / 60))m$((SECONDS % 60))s] $1"; }

step "creating $venv with $("$python" --version)"
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
step "installing torch, megatron-core, transformers and the rest"
"${pip[@]}" install torch==2.14.1 torchvision==0.29.1 -r requirements/cpu.txt
# Last, so that pip does not list the CUDA packages that are missing on purpose.
step "installing sglang (without the CUDA packages that it lists)"
"${pip[@]}" install --no-deps sglang==0.5.23 xgrammar==0.2.7
step "compiling csrc/ and installing bapo_megatron"
# Against the torch above; in isolation pip would fetch another one to build with.
"${pip[@]}" install --no-build-isolation --no-deps --editable .
"$venv/bin/python" -m bapo_megatron.runtime.stack  # ends set-up with one line if they do not work together
step "done"
