#!/usr/bin/env bash
# Training on one machine without a GPU: tiny model → BAPO with real Megatron-core and real
# SGLang → report.   usage: examples/demo.sh PYTHON [SEED] [KEY=VALUE ...]
# The run directory, runs/demo or that of run_dir=…, is replaced if it holds an earlier run.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:?usage: examples/demo.sh PYTHON [SEED] [KEY=VALUE ...]}
seed=${2:-0}
shift $(($# < 2 ? $# : 2))
tiny=runs/demo-tiny-seed$seed
run=runs/demo
for override in "$@"; do
    [[ $override != run_dir=* ]] || run=${override#run_dir=}
done
: "${run:?run_dir= names no directory; give one, or leave it out}"
if [[ -e $run && ! -f $run/config.yaml ]]; then
    echo "examples/demo.sh: $run is not the directory of a run; remove it, or name another run_dir" >&2
    exit 2
fi

# On the CPU even where there are GPUs: two ranks and a server would need three.
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
"$python" -m examples.tiny "$tiny" --seed "$seed"
rm -rf "$run" # an earlier demo
"$python" -m bapo_megatron.torchrun --nproc-per-node 2 -m bapo_megatron \
    train configs/demo.yaml "run_dir=$run" "seed=$seed" "model.path=$tiny/model" \
    "data.train.path=$tiny/train.jsonl" "eval.sets=[{path: $tiny/heldout.jsonl, name: heldout}]" "$@"
"$python" -m bapo_megatron report "$run" examples/demo_grpo
echo "summary: $run/summary.json   report: $run/report.html   model: $run/hf"
