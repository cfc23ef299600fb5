#!/usr/bin/env bash
# Installs the oldest SGLang that is supported, for the tests, into a folder of its own in VENV.
# usage: requirements/older_sglang.sh VENV
set -euo pipefail

venv=${1:?usage: requirements/older_sglang.sh VENV}
version=0.5.20
folder=$venv/sglang-$version

[ ! -e "$folder/.complete" ] || exit 0
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps --upgrade \
    --target "$folder" "sglang==$version"
# Written last: an interrupted installation is made again.
touch "$folder/.complete"
