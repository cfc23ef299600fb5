#!/usr/bin/env bash
# Trains on the GPUs of one machine. Rank 0 starts the SGLang server, unless rollout.servers names
# some or replay needs none.
# usage: [NPROC=gpu] [PYTHON=python] examples/single_node.sh CONFIG [KEY=VALUE ...]
# The same command continues a run.
set -euo pipefail

: "${1:?usage: examples/single_node.sh CONFIG [KEY=VALUE ...]}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
trap '' USR1 # until torchrun handles it

exec "${PYTHON:-python}" -m bapo_megatron.torchrun --nproc-per-node "${NPROC:-gpu}" \
    -m bapo_megatron train "$@" --resume
