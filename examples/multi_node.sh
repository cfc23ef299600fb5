#!/usr/bin/env bash
# Trains on several machines: the same command on each, with its own NODE_RANK. Rank 0, which owns
# data, servers and metrics, is on the machine with NODE_RANK=0; MASTER_ADDR is an address of its
# own, on the network between the machines, and the only one that its store listens on.
# usage: NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 [MASTER_PORT=29500] [NPROC=gpu] [PYTHON=python] \
#            examples/multi_node.sh CONFIG [KEY=VALUE ...]
# In a Slurm step of one task per node NODE_RANK may be left out. The same command continues a run.
# With PREFLIGHT=1 it trains nothing, but checks the machines and what is between them.
set -euo pipefail

: "${1:?usage: NNODES=… NODE_RANK=… MASTER_ADDR=… examples/multi_node.sh CONFIG [KEY=VALUE ...]}"
: "${NNODES:?set NNODES to the number of machines}"
: "${NODE_RANK:=${SLURM_PROCID:?set NODE_RANK to the number of this machine, from 0}}"
: "${MASTER_ADDR:?set MASTER_ADDR to the address of the machine with NODE_RANK=0}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
trap '' USR1 # until torchrun handles it
command=(train "$@" --resume)
if [[ ${PREFLIGHT:-} ]]; then command=(doctor --cluster "$@"); fi

exec "${PYTHON:-python}" -m bapo_megatron.torchrun \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "${NPROC:-gpu}" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    -m bapo_megatron "${command[@]}"
