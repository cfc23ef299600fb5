#!/usr/bin/env bash
# Scores a Hugging Face model on the evaluation sets of a configuration: avg@k and pass@k. A run's
# trained model is in its hf/ directory.
# usage: [PYTHON=python] examples/evaluate.sh CONFIG MODEL RUN_DIR [KEY=VALUE ...]
set -euo pipefail

usage="usage: examples/evaluate.sh CONFIG MODEL RUN_DIR [KEY=VALUE ...]"
config=${1:?$usage} model=${2:?$usage} run_dir=${3:?$usage}
shift 3

exec "${PYTHON:-python}" -m bapo_megatron eval "$config" \
    "model.path=$model" "run_dir=$run_dir" "$@"
