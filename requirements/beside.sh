#!/usr/bin/env bash
# Installs for the tests what must not be importable everywhere, each into a folder of its own in VENV:
# the oldest SGLang that is supported, and Transformer Engine's Python sources without its compiled parts. Chromium,
# in which the page of `report` is tested, comes from the distribution's packages where that is possible.
# usage: requirements/beside.sh VENV
set -euo pipefail

venv=${1:?usage: requirements/beside.sh VENV}

for wanted in sglang==0.5.20 transformer-engine==2.11.0; do
    folder=$venv/${wanted/==/-}
    [ ! -e "$folder/.complete" ] || continue
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-deps --upgrade \
        --target "$folder" "$wanted"
    # Written last: an interrupted installation is made again.
    touch "$folder/.complete"
done

# Without it, its tests fail and say so; all others run.
if ! command -v chromium chromium-browser google-chrome chrome >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null ||
            echo "beside: apt-get could not install chromium, which the tests of report need" >&2
    else
        echo "beside: no Chromium was found, which the tests of report need; install it (Debian: apt-get install chromium)" >&2
    fi
fi
