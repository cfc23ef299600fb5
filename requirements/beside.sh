#!/usr/bin/env bash
# Installs for the tests what must not be importable everywhere, each into a folder of its own in VENV:
# the oldest SGLang that is supported, and Transformer Engine's Python sources without its compiled parts.
# usage: requirements/beside.sh VENV
set -euo pipefail

venv=${1:?usage: requirements/beside.sh VENV}

for wanted in transformer-engine==2.11.0; do
    folder=$venv/${wanted/==/-}
    [ ! -e "$folder/.complete" ] || continue
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps --upgrade \
        --target "$folder" "$wanted"
    # Written last: an interrupted installation is made again.
    touch "$folder/.complete"
done
