#!/usr/bin/env bash
# Runs the SGLang servers of rollout.server on this machine, without a trainer, and restarts them
# when they end. HOST is the address that they listen on, in a Slurm step the node's name.
# usage: [HOST=10.0.0.7] [PYTHON=python] examples/rollout_servers.sh CONFIG [KEY=VALUE ...]
# The keys are in BAPO_MEGATRON_ADMIN_API_KEY and BAPO_MEGATRON_API_KEY, here and where the trainer
# runs. Missing keys are generated and printed, the second only if HOST is not the loopback.
set -euo pipefail

config=${1:?usage: [HOST=10.0.0.7] examples/rollout_servers.sh CONFIG [KEY=VALUE ...]}
shift

exec "${PYTHON:-python}" -m bapo_megatron serve "$config" \
    "rollout.server.host=${HOST:-${SLURMD_NODENAME:-127.0.0.1}}" "$@"
