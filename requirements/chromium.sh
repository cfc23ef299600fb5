#!/usr/bin/env bash
# Sees to Chromium, in which the page of `report` is tested: from the distribution's packages.
set -euo pipefail

if command -v chromium chromium-browser google-chrome chrome >/dev/null; then
    exit
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "chromium: not found; install it (Debian: apt-get install chromium)" >&2
    exit 1
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium >/dev/null
