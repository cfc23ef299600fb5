#!/usr/bin/env bash
# Installs bubblewrap, in which programs of the policy run, from the distribution's packages, where that can be
# done without a password. Where it cannot, runs that need it end with one line, and its tests are skipped, or fail in CI.
set -euo pipefail

if command -v bwrap >/dev/null; then
    exit
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no bubblewrap was found: programs of the policy cannot run (Debian: sudo apt-get install bubblewrap)" >&2
    exit
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null
