#!/usr/bin/env bash
# A real language model of 135M parameters, trained by BAPO on two cores without a GPU.
# usage: [RANKS=2] examples/smollm/run.sh PYTHON [SEED] [KEY=VALUE ...]
# The run directory, runs/smollm2-135m-seedN or that of run_dir=…, is replaced if it holds an
# earlier run.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${1:?usage: [RANKS=2] examples/smollm/run.sh PYTHON [SEED] [KEY=VALUE ...]}
seed=${2:-0}
shift $(($# < 2 ? $# : 2))
dir=runs/smollm2
run=runs/smollm2-135m-seed$seed
for override in "$@"; do
    [[ $override != run_dir=* ]] || run=${override#run_dir=}
done
: "${run:?run_dir= names no directory; give one, or leave it out}"
if [[ -e $run && ! -f $run/config.yaml ]]; then
    echo "examples/smollm/run.sh: $run is not the directory of a run; remove it, or name another run_dir" >&2
    exit 2
fi

export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
"$python" -m examples.smollm.model "$dir"
"$python" -m examples.smollm.data "$dir"
rm -rf "$run" # an earlier run
"$python" -m bapo_megatron.torchrun --nproc-per-node "${RANKS:-2}" -m bapo_megatron \
    train configs/smollm2-135m.yaml "run_dir=$run" "seed=$seed" "$@"
for when in before after; do
    [[ $when == before ]] && model=$dir/model || model=$run/hf
    "$python" -m bapo_megatron eval "$run/config.yaml" "model.path=$model" "run_dir=$run/greedy-$when" \
        eval.temperature=0 eval.samples_per_prompt=1
done
"$python" -m bapo_megatron report "$run"
echo "page: $run/report.html   model: $run/hf"
