"""Runs a sweep's runs: on this machine, where none outlives the sweep, or as a Slurm array."""

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bapo_megatron.errors import InterruptedRunError
from bapo_megatron.runtime.files import lock
from bapo_megatron.runtime.processes import (
    child_environment,
    describe_exit,
    end_group,
    open_log,
    tail,
)
from bapo_megatron.telemetry.console import ProgressLine, say
from bapo_megatron.tools.sweep.file import PlannedRun, Sweep

_DEFAULTS = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Variables of a run where the environment has none, as in the launch scripts (docs/launch.md)."""
_POLL_S = 0.1
_PROGRESS_S = 5.0
_ERROR_PREFIX = "bapo-megatron: "
"""Beginning of the line in which ``train`` says why it ended."""

_SCRIPT = """\
#!/usr/bin/env bash
# The runs of {file} as a Slurm array, {jobs} at a time. Submit it with sbatch; afterwards
# `bapo-megatron sweep {file}` shows the results. Before the time limit a run saves and its task is
# requeued; a finished run exits at once.
# Set the time, and whatever else your site needs.
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
rm -f "$run_dir/stopped" # of an earlier attempt, in case this one fails before train removes it
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


@dataclass(frozen=True, slots=True)
class _Active:
    run: PlannedRun
    slot: int
    process: subprocess.Popen[bytes]
    began_s: float


def run_sweep(sweep: Sweep) -> dict[str, str]:
    """Begin or continue every run that is not finished; return why some failed, by their labels.

    A failed run does not stop the others. On an interrupt, or any other end of this process, the
    runs in progress save and end; a second interrupt ends them at once.

    Raises:
        ValueError: Another sweep, or what is left of one, works in the directory.
        InterruptedRunError: It was interrupted.
    """
    active: list[_Active] = []
    with _locked(sweep.config.dir) as lock_file, ProgressLine() as progress:
        try:
            return _run_all(sweep, active, lock_file, progress)
        except KeyboardInterrupt:
            raise InterruptedRunError("interrupted; rerun the command to continue") from None
        finally:
            _stop(active)


def _run_all(
    sweep: Sweep, active: list[_Active], lock_file: IO[bytes], progress: ProgressLine
) -> dict[str, str]:
    """Keep ``jobs`` runs in progress, listed in ``active``; return the failures at the end."""
    num_runs, failures = len(sweep.runs), {}
    waiting = [run for run in sweep.runs if not run.is_finished]
    free = list(range(sweep.config.jobs))
    if len(waiting) < num_runs:
        say(f"{num_runs - len(waiting)} of {num_runs} runs are finished already")
    shown_s = 0.0
    while waiting or active:
        while waiting and free:
            active.append(_start(sweep, waiting.pop(0), free.pop(0), lock_file))
        for ended in [entry for entry in active if entry.process.poll() is not None]:
            active.remove(ended)
            free.append(ended.slot)
            end_group(ended.process)
            took_s = time.monotonic() - ended.began_s
            if reason := _failure(ended):
                failures[ended.run.label] = reason
                say(f"{ended.run.label}: failed after {took_s:,.0f} s: {reason}")
            else:
                say(f"{ended.run.label}: finished, {took_s:,.0f} s")
        if time.monotonic() - shown_s >= _PROGRESS_S:
            shown_s = time.monotonic()
            steps = ", ".join(f"{a.run.label} step {_last_step(a.run)}" for a in active)
            progress.update(f"{num_runs - len(waiting) - len(active)}/{num_runs} runs: {steps}")
        time.sleep(_POLL_S)
    return failures


def _start(sweep: Sweep, run: PlannedRun, slot: int, lock_file: IO[bytes]) -> _Active:
    environment = {**_DEFAULTS, **child_environment()}
    if sweep.gpu_shares:
        environment["CUDA_VISIBLE_DEVICES"] = sweep.gpu_shares[slot]
    with open_log(run.log) as log:
        process = subprocess.Popen(
            # It saves and ends when the sweep is gone.
            [sys.executable, "-m", "bapo_megatron.runtime.processes", *run.command()],
            env=environment,
            # The lock is held until the run has ended, whatever ends the sweep.
            pass_fds=(lock_file.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the sweep alone
        )
    return _Active(run, slot, process, time.monotonic())


def _failure(ended: _Active) -> str:
    """Return why a run has ended without its last step; empty if it has not."""
    status = ended.process.returncode
    if status == 0 and ended.run.is_finished:
        return ""
    lines = [line.strip() for line in tail(ended.run.log).splitlines()]
    errors = [line for line in lines if line.startswith(_ERROR_PREFIX)] or lines
    return f"{errors[-1].removeprefix(_ERROR_PREFIX)} ({describe_exit(status)})"


def _stop(active: Sequence[_Active]) -> None:
    """Have the runs in progress save and end; a second Ctrl-C ends them at once."""
    if not active:
        return
    for entry in active:
        entry.process.terminate()
    labels = ", ".join(entry.run.label for entry in active)
    say(f"saving and ending {labels}; press Ctrl-C again to end them at once")
    # The first signal had all further ones ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for entry in active:
            entry.process.wait()
    except KeyboardInterrupt:
        say("ending them at once")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for entry in active:
            end_group(entry.process)


@contextmanager
def _locked(directory: Path) -> Iterator[IO[bytes]]:
    """Hold the lock of a sweep's directory; its runs inherit it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("ab") as file:  # NFS locks no directory
        try:
            if not lock(file):
                say(f"{directory}: file system does not support locks; do not start a second sweep")
        except BlockingIOError as error:
            raise ValueError(
                f"{directory}: in use by another sweep, or by runs of a killed one that still "
                "save; wait until they end"
            ) from error
        yield file


def _last_step(run: PlannedRun) -> str:
    steps = re.findall(r'^ *{"step": (\d+)', tail(run.run_dir / "metrics.jsonl"), re.MULTILINE)
    return f"{steps[-1] if steps else 0}/{run.config.train.steps}"


def slurm_script(sweep: Sweep) -> str:
    """Return the text of an sbatch script; all paths are as seen from this directory."""
    cases = [
        f"{number})\n    run_dir={shlex.quote(str(run.run_dir))}\n"
        f"    command=({shlex.join(run.command())})\n    ;;"
        for number, run in enumerate(sweep.runs)
    ]
    exports = [f"export {name}=${{{name}:-{value}}}" for name, value in _DEFAULTS.items()]
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
