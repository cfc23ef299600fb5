#!/usr/bin/env bash
# The main job on one machine without a GPU: tiny model → BAPO with real Megatron-core and real
# SGLang → figures.   usage: examples/demo.sh PYTHON [SEED] [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:?usage: examples/demo.sh PYTHON [SEED] [KEY=VALUE ...]}
seed=${2:-0}
shift $(($# < 2 ? $# : 2))
tiny=runs/demo-tiny-seed$seed
run=runs/demo

export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
"$python" -m bapo_megatron make-tiny "$tiny" --seed "$seed"
rm -rf "$run" # an earlier demo
"$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
    --nproc-per-node 2 -m bapo_megatron \
    train configs/demo.yaml "seed=$seed" "run_dir=$run" "model.path=$tiny/model" \
    "data.train.path=$tiny/train.jsonl" "eval.sets=[{path: $tiny/heldout.jsonl, name: heldout}]" "$@"
"$python" -m bapo_megatron plot "$run"
echo "summary: $run/summary.json   figures: $run/dynamics.png   model: $run/hf"
