#!/usr/bin/env bash
# Runs SGLang servers, and nothing else, on this machine: SERVERS of them on TENSOR GPUs each, at
# http://HOST:PORT, PORT + 1, … When one ends, all end.
# usage: MODEL=models/NAME HOST=10.0.0.7 [PORT=30000] [SERVERS=8] [TENSOR=1] [PYTHON=python] \
#            examples/rollout_servers.sh [ARGUMENT OF sglang.launch_server ...]
# In a Slurm step HOST may be left out. The keys are in BAPO_MEGATRON_ADMIN_API_KEY and, if
# generation is to need one as well, BAPO_MEGATRON_API_KEY, here and where the trainer runs.
set -euo pipefail

: "${MODEL:?set MODEL to the directory in model.path of the run}"
: "${HOST:=${SLURMD_NODENAME:?set HOST to the address to listen on}}"
: "${BAPO_MEGATRON_ADMIN_API_KEY:?set it: whoever reaches the port could replace the weights}"
port=${PORT:-30000} servers=${SERVERS:-8} tensor=${TENSOR:-1}

trap 'jobs -p | xargs --no-run-if-empty kill 2> /dev/null || true; wait' EXIT
for ((i = 0; i < servers; i++)); do
    "${PYTHON:-python}" -m bapo_megatron.rollout.sglang_launcher --model-path "$MODEL" \
        --host "$HOST" --port $((port + i)) --dtype bfloat16 \
        --tensor-parallel-size "$tensor" --base-gpu-id $((i * tensor)) \
        --log-level-http warning "$@" &
done
wait -n
