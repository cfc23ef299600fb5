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

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    if [ -n "$wanted" ]; then
        supported "$wanted" || fail "$wanted does not run or is not Python 3.11 or 3.12; set PYTHON=/path/to/python3.11"
        echo "$wanted"
        return
    fi
    for candidate in python3.11 python3.12 python3; do
        if command -v "$candidate" >/dev/null && supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 was found; install one (Debian: apt-get install python3.11) or set PYTHON="
}

python=$(find_python)
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv module; install it (Debian: apt-get install python3-venv)"
"$python" -c 'import pathlib, sysconfig, sys; sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' ||
    fail "the headers of $python are missing; install them (Debian: apt-get install python3-dev)"
command -v "${CXX:-c++}" >/dev/null ||
    fail "no C++ compiler (${CXX:-c++}) was found; install one (Debian: apt-get install g++) or set CXX="
[ "$(uname -sm)" = "Linux x86_64" ] || fail "only Linux on x86-64 is supported, this is $(uname -sm)"

step() { echo "[$((SECONDS / 60))m$((SECONDS % 60))s] $1"; }

step "creating $venv with $("$python" --version)"
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
step "installing torch"
"${pip[@]}" install torch==2.13.0
# A build of torch with CUDA brings the triton that it needs; SGLang imports it beside a CPU build too.
"$venv/bin/python" -c 'import triton' 2>/dev/null || "${pip[@]}" install triton==3.9.0
step "installing megatron-core, transformers and the rest"
"${pip[@]}" install -r requirements/cpu.txt
# Last, so that pip does not list the CUDA packages that are missing on purpose.
step "installing sglang (without the CUDA packages that it lists)"
"${pip[@]}" install --no-deps sglang==0.5.21 torchvision==0.28.0 xgrammar==0.2.7
step "compiling csrc/ and installing bapo_megatron"
# Against the torch above; in isolation pip would fetch another one to build with.
"${pip[@]}" install --no-build-isolation --no-deps --editable .
step "done"
