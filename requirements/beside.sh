#!/usr/bin/env bash
# Installs for the tests what must not be importable everywhere into a folder of its own in VENV:
# Transformer Engine's Python sources without its compiled parts.
# usage: requirements/beside.sh VENV
set -euo pipefail

venv=${1:?usage: requirements/beside.sh VENV}
wanted=transformer-engine==2.20.2
folder=$venv/${wanted/==/-}
[ ! -e "$folder/.complete" ] || exit 0
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps --upgrade \
    --target "$folder" "$wanted"
# Written last: an interrupted installation is made again.
touch "$folder/.complete"
