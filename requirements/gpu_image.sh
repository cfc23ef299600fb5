#!/usr/bin/env bash
# Tries as much of Containerfile.gpu as goes without a container engine and a GPU, and prints a log: every wheel of
# gpu_image.txt downloads for this interpreter and platform with its checksum, they satisfy gpu.txt and each other, and
# the extension compiles by the image's line in a fresh environment. Needs Python 3.12, nvcc of CUDA 13 and 30 GB.
# usage: requirements/gpu_image.sh DIRECTORY [PYTHON]
set -euo pipefail
directory=$(realpath -m "${1:?usage: requirements/gpu_image.sh DIRECTORY [PYTHON]}") python=${2:-python3.12}
cd "$(dirname "$0")/.."

"$python" -m venv "$directory/venv"
pip=("$directory/venv/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" download --no-deps --require-hashes --only-binary :all: --dest "$directory/wheels" \
    -r requirements/gpu_image.txt
du -m "$directory"/wheels/*.whl | awk '{sum += $1} END {print NR " wheels, " sum " MB; of 50 MB and more:"}'
du -m "$directory"/wheels/*.whl | awk -F '[/\t]' '$1 >= 50 {print $1 " MB  " $NF}' | sort -rn
local=(--no-index --find-links "$directory/wheels")
sed -n 's/ --hash.*//p' requirements/gpu_image.txt >"$directory/pins.txt"
"$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
    >"$directory/package.txt"
"${pip[@]}" install "${local[@]}" --dry-run --ignore-installed --only-binary :all: \
    -r requirements/gpu.txt -r "$directory/package.txt" -r "$directory/pins.txt"
echo "gpu.txt, this package's own requirements and all pins agree, from these wheels alone"
"${pip[@]}" install "${local[@]}" --no-deps torch setuptools wheel packaging ninja pybind11
BAPO_FORCE_CUDA_BUILD=1 BAPO_CUDA_ARCHS="90;100" "${pip[@]}" install --no-deps --no-build-isolation \
    --target "$directory/site" .
echo "the extension holds: $(grep -aoE '(sm|compute)_[0-9]+' "$directory"/site/bapo_megatron/_C*.so | sort -u | xargs)"
