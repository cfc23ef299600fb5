#!/usr/bin/env bash
# Installs Chromium for the tests of report's page, from the distribution's packages, where that can be done
# without a password. Where it cannot, those tests are skipped, or fail in CI.
set -euo pipefail

if command -v chromium chromium-browser google-chrome chrome >/dev/null; then
    exit
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Chromium was found: the tests of report's page are skipped (Debian: sudo apt-get install chromium)" >&2
    exit
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium >/dev/null
