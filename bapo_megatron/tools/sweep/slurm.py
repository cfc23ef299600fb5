"""A sweep as a Slurm array: one script, one task per run."""

import shlex
from pathlib import Path

from bapo_megatron.tools.sweep.file import Sweep
from bapo_megatron.tools.sweep.run import DEFAULTS

_SCRIPT = """\
#!/usr/bin/env bash
# The runs of {file} as a Slurm array, {jobs} at a time. Submit it with sbatch; afterwards
# `bapo-megatron sweep {file}` shows the results. Before its time is over a run is saved and its
# task queued again; a finished run ends at once.
# Set the time, and whatever else your site wants.
#SBATCH --job-name={name} --array=0-{last}%{jobs} --time=24:00:00
#SBATCH --requeue --open-mode=append --signal=B:USR1@900 --output={log}
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node={gpus}
set -euo pipefail
cd {here}
{exports}
case "$SLURM_ARRAY_TASK_ID" in
{cases}
esac
[[ ! -e $run_dir/summary.json ]] || exit 0
rm -f "$run_dir/stopped" # an earlier try's, if this one fails before train removes it
"${{command[@]}}" &
trainer=$! is_cancelled='' status=0
trap 'kill "$trainer" || true' USR1
trap 'is_cancelled=1; kill "$trainer" || true' TERM
while kill -0 "$trainer" 2>/dev/null; do wait "$trainer" && status=0 || status=$?; done
if [[ -e $run_dir/stopped && ! $is_cancelled ]]; then # saved
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
    status=0
fi
exit "$status"
"""


def slurm_script(sweep: Sweep) -> str:
    """Return the text of an sbatch script; all paths are as seen from this directory."""
    cases = [
        f"{number})\n    run_dir={shlex.quote(str(run.run_dir))}\n"
        f"    command=({shlex.join(run.command())})\n    ;;"
        for number, run in enumerate(sweep.runs)
    ]
    exports = [f"export {name}=${{{name}:-{value}}}" for name, value in DEFAULTS.items()]
    return _SCRIPT.format(
        file=shlex.quote(str(sweep.file)),
        jobs=sweep.config.jobs,
        name=shlex.quote(sweep.config.dir.name),
        last=len(sweep.runs) - 1,
        log=shlex.quote(f"{sweep.config.dir}/slurm-%a.log"),
        gpus=max(run.num_gpus for run in sweep.runs),
        here=shlex.quote(str(Path.cwd())),
        exports="\n".join(exports),
        cases="\n".join(cases),
    )
