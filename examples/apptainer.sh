#!/usr/bin/env bash
# Python inside the image of Containerfile.gpu, for PYTHON= of the other scripts:
#   apptainer build bapo.sif docker-archive:bapo.tar
#   PYTHON=examples/apptainer.sh APPTAINER_IMAGE=bapo.sif sbatch examples/slurm.sbatch CONFIG
# usage: APPTAINER_IMAGE=FILE.sif examples/apptainer.sh ARGUMENTS
set -euo pipefail
: "${APPTAINER_IMAGE:?usage: APPTAINER_IMAGE=FILE.sif examples/apptainer.sh ARGUMENTS}"
exec apptainer exec --nv --bind "$PWD" --pwd "$PWD" "$APPTAINER_IMAGE" python "$@"
